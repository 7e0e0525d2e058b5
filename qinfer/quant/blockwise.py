"""One decoder block at a time: take the samples to a linear's input, quantize it, go on.

The order is truly sequential: what a linear is calibrated on was computed with the quantized
weights of everything before it, within the block too. Each linear runs once per sample. Samples
are spread over threads; the sums over them are taken in their order, so that the bits do not
depend on the threads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from qinfer.kernels.cpu.arena import release_freed
from qinfer.quant.gptaq import WIDE_INPUTS, KeptShift, enough_pairs, weight_shift
from qinfer.quant.hessian import InputStatistics, check_finite
from qinfer.quant.solver import Solved, SolverOptions, round_to_nearest, solve_modules
from qinfer.quant.stages import BlockStages, Stage, Stream
from qinfer.quant.targets import Target
from qinfer.quant.workers import Workers

_GROUP_BYTES = 16 * 2**20  # inputs held at once, per thread; at least one sample each
_MAX_SAMPLES = 16  # at once, per thread

OnSample = Callable[[], None]


class BlockRunner:
    """Runs the stages of blocks over the calibration samples.

    Args:
        lengths: tokens of every sample.
        workers: the threads.
        options: how linears are solved.
        folder: of what is put aside for a while.
        on_sample: called for each sample of each pass.

    Attributes:
        dtype: of the linears' weights that stages compute with.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        workers: Workers,
        options: SolverOptions,
        *,
        folder: Path,
        on_sample: OnSample = lambda: None,
    ) -> None:
        self._lengths = tuple(lengths)
        self._workers = workers
        self._options = options
        self._folder = folder
        self._on_sample = on_sample
        self.dtype = linear_dtype()

    def solve(
        self, block: BlockStages, streams: Sequence[Stream], targets: Mapping[str, Target]
    ) -> Iterator[tuple[str, Solved]]:
        """Take the samples through the stages of a block, quantizing its linears on the way.

        Args:
            block: its stages.
            streams: the quantized one, whose weights are replaced as they are solved, and for
                GPTAQ the unquantized one.
            targets: by name inside the block, every linear.

        Yields:
            Name inside the block and result of each module that is quantized, in the order of the
            stages.

        Raises:
            NonFiniteError: an activation is not finite; names the layer and the sample.
        """
        weights = streams[0].weights
        for stage in block.stages:
            wanted = {name: targets[name] for name in stage.names if targets[name].scheme}
            gathered = self._pass(stage, streams, list(wanted.values()))
            for stream in streams:
                for name in stage.done:
                    del stream.weights[name]
            if gathered is not None:
                for name, solved in self._solve(stage, gathered, weights, wanted):
                    weights[name] = solved.weight.dequantize(self.dtype)
                    yield name, solved
            for name in stage.names:
                weights[name] = weights[name].to(self.dtype)

    def outputs(self, block: BlockStages, stream: Stream, write: "WriteRows", name: str) -> None:
        """Hand the block's output of every sample to `write`.

        Args:
            block: its stages, all of which were run.
            stream: whose output.
            write: called with sample and rows, by several threads.
            name: of the block, for messages.

        Raises:
            NonFiniteError: an output is not finite; names the sample.
        """

        def one(sample: int) -> None:
            hidden = block.output(stream, sample)
            check_finite(hidden, name=f"the output of {name}", sample=sample)
            write(sample, hidden)

        self._workers.map(one, range(stream.num_samples))

    def _solve(
        self,
        stage: Stage,
        gathered: "_Gathered",
        weights: Mapping[str, torch.Tensor],
        wanted: Mapping[str, Target],
    ) -> Iterator[tuple[str, Solved]]:
        stats = gathered.stats
        if stats.num_tokens or stage.unseen is None:
            if stats.in_features >= WIDE_INPUTS:
                release_freed()
            executor, shift = self._workers.executor, gathered.shift.take
            yield from solve_modules(
                stats, weights, wanted, self._options, shift=shift, executor=executor
            )
            return
        for name, target in wanted.items():
            solved = round_to_nearest(target, weights[name])
            yield name, replace(solved, row=replace(solved.row, fallback=stage.unseen))

    def _pass(
        self, stage: Stage, streams: Sequence[Stream], readers: Sequence[Target]
    ) -> "_Gathered | None":
        """Take every sample to an input and gather the statistics for the linears that read it.

        Returns None if there are no such linears.
        """
        stats, shift = None, KeptShift(None, self._folder)
        pairs = streams[1].num_samples if len(streams) > 1 else 0
        if readers:
            short = "/".join(target.name.rpartition(".")[2] for target in readers)
            name = f"{readers[0].name.rpartition('.')[0]}.{short}"
            width = readers[0].in_features
            paired = pairs > 0 and enough_pairs(sum(self._lengths[:pairs]), width)
            stats = InputStatistics(width, name=name, paired=paired)

        def inputs(sample: int) -> tuple[torch.Tensor, ...]:
            return tuple(stage.to_input(s, sample) for s in streams if sample < s.num_samples)

        for group in self._groups(streams, readers, pairs):
            found = self._workers.map(inputs, group)
            if stats is not None:
                stats.add_samples(
                    [x[0] for x in found],
                    first=group[0],
                    fulls=[x[1] for x in found if len(x) > 1] if stats.paired else None,
                    executor=self._workers.executor,
                )
                if group.stop == pairs and enough_pairs(stats.num_paired_tokens, stats.in_features):
                    found_shift = weight_shift(stats, self._options.damp_percent)
                    shift = KeptShift(found_shift, self._folder)
            for _ in group:
                self._on_sample()
        return None if stats is None else _Gathered(stats, shift)

    def _groups(
        self, streams: Sequence[Stream], readers: Sequence[Target], pairs: int
    ) -> Iterator[range]:
        """Cut the samples into groups whose inputs are in memory at once; one ends with the pairs.

        How many there are in a group does not change the bits: every sample is added on its own.
        """
        count, threads = len(self._lengths), self._workers.threads
        width = readers[0].in_features if readers else 1
        sample_bytes = 4 * width * max(self._lengths) * len(streams)
        size = threads * samples_at_once(sample_bytes)
        for first, last in ((0, pairs), (pairs, count)):
            for start in range(first, last, size):
                yield range(start, min(start + size, last))


@dataclass(frozen=True, slots=True, eq=False)
class _Gathered:
    """What a pass found out about an input, and the shift of the weights that read it (GPTAQ)."""

    stats: InputStatistics
    shift: KeptShift


def samples_at_once(sample_bytes: int) -> int:
    """Return of how many samples, whose inputs take so much, a thread holds the inputs."""
    return max(1, min(_MAX_SAMPLES, _GROUP_BYTES // sample_bytes))


def linear_dtype() -> torch.dtype:
    """Return the type in which linears are multiplied while calibrating.

    bfloat16 where the CPU multiplies it twice as fast as float32 (with float32 sums): its rounding
    is a small part of what quantizing does to the activations. Attention mixes its values so too;
    `hessian.sum_dtype` says what Hessians are summed from.
    """
    bf16 = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.bfloat16 if bf16 else torch.float32


WriteRows = Callable[[int, torch.Tensor], None]
