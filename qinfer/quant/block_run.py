"""From the first unfinished block to the last: weights in, finished blocks out."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from qinfer.checkpoint.partial import PartialDirectory
from qinfer.checkpoint.reader import Checkpoint
from qinfer.errors import CheckpointError
from qinfer.models.load import EMBEDDING, block_weights
from qinfer.quant import output
from qinfer.quant.activations import Rows, SampleSequence
from qinfer.quant.blockwise import BlockRunner
from qinfer.quant.calibration import CalibrationSet
from qinfer.quant.commit import Committer, FinishedBlock
from qinfer.quant.config import QuantizeConfig
from qinfer.quant.gptaq import TOKENS_PER_INPUT, enough_pairs
from qinfer.quant.hessian import check_finite
from qinfer.quant.job import Job, Progress, block_name
from qinfer.quant.report import ModuleRow
from qinfer.quant.solver import Solved, SolverOptions, plain_row, round_to_nearest
from qinfer.quant.stages import Stream
from qinfer.quant.states import Advance, SampleStates, WriteRows, discard_stale
from qinfer.quant.targets import Target
from qinfer.quant.workers import Workers
from qinfer.schemes import WeightScheme

Weights = dict[str, torch.Tensor]

_log = logging.getLogger(__name__)


class JsonRow(Protocol):
    """A row of a record."""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        ...


class ChangedBlock(Protocol):
    """A block's changed weights, and what was done to them."""

    @property
    def weights(self) -> Weights:
        """Only those that changed, by name inside the block, linears without a suffix."""
        ...

    @property
    def row(self) -> JsonRow:
        """What was done."""
        ...


class BlockConditioner(Protocol):
    """Changes a block's weights before it is calibrated, without changing what it computes."""

    def condition(
        self,
        layer: int,
        weights: Mapping[str, torch.Tensor],
        hidden: Sequence[torch.Tensor],
        schemes: Mapping[str, WeightScheme | None] | None = None,
    ) -> ChangedBlock:
        """Return what to change in a layer.

        Args:
            layer: its index.
            weights: by name inside the block, as the source has them.
            hidden: the block's input for every calibration window, `[tokens, hidden]`, read when
                it is asked for.
            schemes: how the linears will be quantized then, by the same names.
        """
        ...


def dense_weights(job: Job, layer: int) -> Weights:
    """Read a block's weights by their names inside it, in the types of the file."""
    return {
        name: weight
        for name, weight in block_weights(job.source, job.model, layer).items()
        if isinstance(weight, torch.Tensor)
    }


def round_blocks(job: Job, partial: PartialDirectory, workers: Workers, progress: Progress) -> None:
    """Round the linears of every unfinished block; no block depends on another.

    Raises:
        QuantizationError: a scale exceeds float16.
        NonFiniteError: a weight is not finite.
        CheckpointError: a block cannot be read or written.
    """
    finished = partial.finished_blocks()
    with Committer(partial) as committer:
        for layer in range(job.num_run):
            wanted = [t for t in job.targets_of(layer).values() if t.scheme is not None]
            if layer in finished:
                progress.skip(samples=0, modules=len(wanted))
                continue

            def one(target: Target) -> tuple[ModuleRow, Weights]:
                return _rounded(job, target, job.source.tensor(f"{target.name}.weight"))

            results = workers.map(one, wanted)
            tensors: Weights = {}
            for row, made in results:
                progress.module(row)
                tensors |= made
            rows = tuple(row for row, _ in results)
            committer.submit(FinishedBlock(layer, tensors, rows))


def _rounded(job: Job, target: Target, weight: torch.Tensor) -> tuple[ModuleRow, Weights]:
    """Return a module's row and tensors, by their full names."""
    if job.rounding is None:
        solved = round_to_nearest(target, weight)
        return solved.row, output.module_tensors(job.plan, target.name, solved.weight)
    parts = job.rounding.quantize(weight, name=target.name)
    row = replace(plain_row(target), error=job.rounding.error(weight, parts, name=target.name))
    return row, {f"{target.name}.{part}": tensor for part, tensor in parts.items()}


class CalibratedRun:
    """The calibration samples on their way through the model.

    Args:
        job: what to do.
        calibration: the samples.
        partial: where finished blocks go.
        workers: the threads.
        progress: of samples and modules.
        in_memory: which activations are kept in memory (see `states`).
        conditioner: changes blocks before they are calibrated; None = nothing does.
    """

    def __init__(
        self,
        job: Job,
        calibration: CalibrationSet,
        partial: PartialDirectory,
        workers: Workers,
        *,
        progress: Progress,
        in_memory: frozenset[str],
        conditioner: BlockConditioner | None = None,
    ) -> None:
        self._job, self._partial, self._workers = job, partial, workers
        self._windows = calibration.windows
        self._lengths = [len(window) for window in calibration.windows]
        self._progress, self._in_memory = progress, in_memory
        self._conditioner = conditioner
        # By the kind of a stream, how many samples it has.
        self._streams = {"": len(self._lengths)}
        if pairs := job.paired_samples(self._lengths):
            self._streams["full"] = pairs
        if job.config.gptaq:
            self._report_few_tokens()
        options = solver_options(job.config)
        self._runner = BlockRunner(
            self._lengths, workers, options, folder=partial.path, on_sample=progress.sample
        )
        self._blocks = job.blocks(max(self._lengths))

    def _report_few_tokens(self) -> None:
        """Tell of the linears for which GPTAQ has too few tokens."""
        tokens = sum(self._lengths[: self._job.config.gptaq_samples])
        widths = {target.in_features for target in self._job.plan.targets if target.scheme}
        few = sorted(width for width in widths if not enough_pairs(tokens, width))
        if few:
            _log.warning(
                "GPTAQ (--gptaq) is left out for linears of %s inputs: the %d tokens of "
                "--gptaq-samples are too few; %d would do",
                ", ".join(str(width) for width in few), tokens, TOKENS_PER_INPUT * few[-1],
            )  # fmt: skip

    def run(self) -> int:
        """Solve every unfinished block.

        Returns:
            The first block that no earlier run had finished.

        Raises:
            NonFiniteError: an activation is not finite; names the layer and the sample.
            QuantizationError: a linear cannot be solved.
            CheckpointError: a block cannot be read or written.
        """
        first, end = first_unfinished(self._job, self._partial), self._job.num_run
        self._count_finished(first)
        discard_stale(self._partial.path, first)
        if first == end:
            return first
        states = [self._start(first, kind, count) for kind, count in self._streams.items()]
        try:
            with Committer(self._partial) as committer:
                for layer in range(first, end):
                    committer.submit(self._run_block(layer, states))
        finally:
            for item in states:
                item.close()
        return first

    def _count_finished(self, first: int) -> None:
        passes = sum(len(block.stages) for block in self._blocks[:first])
        finished = [t for i in range(first) for t in self._job.targets_of(i).values() if t.scheme]
        if first:
            self._progress.skip(samples=passes * len(self._lengths), modules=len(finished))

    def _start(self, layer: int, kind: str, count: int) -> SampleStates:
        """Return the hidden states of the first `count` samples in front of a block."""
        states = SampleStates(
            self._partial.path,
            kind,
            self._lengths[:count],
            hidden_size=self._job.model.hidden_size,
            wide=max(block.wide for block in self._blocks),
            in_memory=self._in_memory,
        )
        if layer:
            states.resume(layer)
        else:
            rows = states.begin()
            self._workers.map(lambda sample: self._embed(sample, rows), range(count))
        return states

    def _embed(self, sample: int, rows: Rows) -> None:
        hidden = embed(self._job.source, self._windows[sample])
        check_finite(hidden, name="model.embed_tokens", sample=sample)
        rows.write(sample, hidden)

    def _run_block(self, layer: int, states: Sequence[SampleStates]) -> FinishedBlock:
        job, block, targets = self._job, self._blocks[layer], self._job.targets_of(layer)
        weights = dense_weights(job, layer)
        changed: Weights = {}
        facts: dict[str, Any] = {}
        if self._conditioner is not None:
            hidden = SampleSequence(states[0].hidden, len(self._lengths))
            schemes = {name: target.scheme for name, target in targets.items()}
            conditioned = self._conditioner.condition(layer, weights, hidden, schemes)
            changed = conditioned.weights
            weights |= changed
            facts["conditioning"] = conditioned.row.to_dict()
        streams: list[Stream] = []
        for item in states:
            own = {n: w if n in targets else w.float() for n, w in weights.items()}
            if item.kind:  # nothing will be solved in this stream
                own |= {name: weights[name].to(self._runner.dtype) for name in targets}
            streams.append(item.stream(own, streams[0] if streams else None))
        del weights
        results = []
        for _, solved in self._runner.solve(block, streams, targets):
            self._progress.module(solved.row)
            results.append(solved)
        advances: list[Advance] = []
        if layer + 1 < job.num_run:
            for item, stream in zip(states, streams, strict=True):

                def fill(write: WriteRows, stream: Stream = stream) -> None:
                    self._runner.outputs(block, stream, write, block_name(layer))

                advances.append(item.advance(layer, fill))
        return _finished(job, layer, results, changed=changed, facts=facts, advances=advances)


def solver_options(config: QuantizeConfig) -> SolverOptions:
    """Return how the options say that linears are solved."""
    return SolverOptions(damp_percent=config.damp_percent, scale_search=config.scale_search)


def first_unfinished(job: Job, partial: PartialDirectory) -> int:
    """Return the first block that is not finished; `job.num_run` if all are."""
    finished = partial.finished_blocks()
    return next((layer for layer in range(job.num_run) if layer not in finished), job.num_run)


def embed(source: Checkpoint, window: Sequence[int]) -> torch.Tensor:
    """Return the embeddings of a window, float32 `[tokens, hidden]`, reading no other rows.

    Raises:
        CheckpointError: they cannot be read, or a token has none.
    """
    vocab = source.shape(EMBEDDING)[0]
    tokens = sorted(set(window))
    if tokens and tokens[-1] >= vocab:
        raise CheckpointError(
            f"{source.path}: the tokenizer gives token {tokens[-1]}, but {EMBEDDING} has "
            f"{vocab} rows"
        )
    rows = torch.cat([source.rows(EMBEDDING, token, token + 1) for token in tokens])
    place = {token: index for index, token in enumerate(tokens)}
    return rows[torch.tensor([place[token] for token in window])].float()


def _finished(
    job: Job,
    layer: int,
    results: Sequence[Solved],
    *,
    changed: Mapping[str, torch.Tensor] | None = None,
    facts: dict[str, Any] | None = None,
    advances: Sequence[Advance] = (),
) -> FinishedBlock:
    """Gather what is to be kept of a block."""
    tensors: Weights = {}
    targets = job.targets_of(layer)
    for name, tensor in (changed or {}).items():
        full = f"{block_name(layer)}.{name}"
        if name not in targets:
            tensors[full] = tensor
        elif targets[name].scheme is None:
            tensors[f"{full}.weight"] = tensor
    for solved in results:
        tensors |= output.module_tensors(job.plan, solved.row.name, solved.weight)
    rows = tuple(solved.row for solved in results)
    return FinishedBlock(layer, tensors, rows, facts or {}, tuple(advances))
