"""How much memory and disk quantizing takes, settled before any work is done."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qinfer import host
from qinfer.errors import CapacityError
from qinfer.kernels.cpu.arena import release_freed
from qinfer.models.config import ModelConfig, block_linear_shapes
from qinfer.quant.allocation import NUM_WINDOWS
from qinfer.quant.blockwise import linear_dtype, samples_at_once
from qinfer.quant.calibration import CalibrationSet
from qinfer.quant.gptaq import WIDE_INPUTS, enough_pairs
from qinfer.quant.head_gradient import ROWS as HEAD_ROWS
from qinfer.quant.head_gradient import TOKENS as HEAD_TOKENS
from qinfer.quant.job import Job
from qinfer.quant.rows_store import row_bytes
from qinfer.quant.stages import BlockStages, Stage
from qinfer.quant.states import HIDDEN, WIDE

_FLOAT_BYTES = 4
_MIB = 2**20
_SLACK_BYTES = 128 * _MIB  # what allocators and libraries keep, small tensors, the report
_HEADER_BYTES = 32 * _MIB  # on the disk: headers, JSON files, tokenizer
_DEFAULT_SHARE = 4  # of the free memory, for activations
_SAMPLE_TENSORS = 6  # of the widest kind that a thread holds at once
# Per entry of a Hessian. While samples are summed: float32 sums. While it is factored: the Hessian,
# a float64 matrix, and the factor that is taken from it. While weights are solved: the first and
# the last. GPTAQ has one more float32 matrix; it lies in a file while a wide Hessian is factored.
_SUM_BYTES, _FACTOR_BYTES, _SOLVE_BYTES = 4, 4 + 8 + 4, 4 + 4
_PIECE_BYTES = 64 * _MIB  # of weights that a thread solves: see `solver`
_WEIGHT_BYTES = 2 * 4  # of a linear whose error is measured: what was wanted, what it lacks


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run keeps in memory, and what it needs of the disk.

    Args:
        in_memory: activations that are kept in memory (see `states`); the others lie in files.
        disk_bytes: that the run takes at its largest.
        sensitivity_room: bytes of activations that are kept in memory while bits are chosen.
    """

    in_memory: frozenset[str]
    disk_bytes: int
    sensitivity_room: int = 0

    @staticmethod
    def settle(
        job: Job, calibration: CalibrationSet | None, *, threads: int, memory: int | None
    ) -> "Budget":
        """Decide what is kept in memory.

        Args:
            job: what will be done.
            calibration: the samples; None = there are none.
            threads: samples computed at once.
            memory: bytes that the process may have resident; None = a quarter of the free memory
                for activations.

        Raises:
            CapacityError: `memory` cannot work; names what is needed.
        """
        output = 2 * job.planned_bytes() + _HEADER_BYTES
        if calibration is None:
            block = _block_elements(job) * (job.element_bytes + _FLOAT_BYTES)
            _check(memory, resident_bytes() + block + _SLACK_BYTES)
            return Budget(frozenset(), output)
        lengths = [len(window) for window in calibration.windows]
        first = lengths[:NUM_WINDOWS]
        release_freed()
        resident = resident_bytes()
        work = resident + _work_bytes(job, lengths, threads)
        measuring = (
            resident + _sensitivity_bytes(job, first, threads) if job.config.allocated else 0
        )
        _check(memory, max(work, measuring))
        in_memory, files = _placed(job, lengths, _room(memory, work))
        room = _room(memory, measuring)
        rows = _sensitivity_rows(job, first) if job.config.allocated else 0
        spilled = rows if rows > room else 0
        return Budget(in_memory, output + max(files, spilled), room)

    def check_disk(self, folder: Path) -> None:
        """Refuse to begin where the disk cannot be enough.

        Raises:
            CapacityError: names what is needed and what is free.
        """
        there = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        free = shutil.disk_usage(folder).free
        if free + there < self.disk_bytes:
            raise CapacityError(
                f"{folder} is on a disk with {free / 1e6:,.0f} MB free, and quantizing needs "
                f"{(self.disk_bytes - there) / 1e6:,.0f} MB there at its largest; free some, or "
                "write to another disk"
            )


def _room(memory: int | None, work: int) -> int:
    """Return the bytes of activations that may be kept in memory beside the work."""
    return host.available_memory() // _DEFAULT_SHARE if memory is None else memory - work


def _placed(job: Job, lengths: Sequence[int], room: int) -> tuple[frozenset[str], int]:
    """Return which activations of calibration are kept in memory, and the bytes of the files."""
    full = lengths[: job.paired_samples(lengths)]
    hidden, wide = (
        row_bytes(lengths, width) + row_bytes(full, width)
        for width in (job.model.hidden_size, max(block.wide for block in job.blocks(1)))
    )
    in_memory = set()
    files = 2 * hidden  # in front of and behind a block
    for name, size in ((HIDDEN, hidden), (WIDE, wide)):
        if size <= room:
            in_memory.add(name)
            room -= size
        else:
            files += size
    return frozenset(in_memory), files


def _check(memory: int | None, needed: int) -> None:
    if memory is not None and memory < needed:
        raise CapacityError(
            f"--memory {memory / 1e6:,.0f} MB is too little: one decoder block, the statistics of "
            f"its inputs and the interpreter take about {needed / 1e6:,.0f} MB; fewer --threads "
            "or shorter samples (--seq-len) take less"
        )


def _work_bytes(job: Job, lengths: Sequence[int], threads: int) -> int:
    """Return what a block takes while it is calibrated, without the samples' stored states."""
    longest, pairs = max(lengths), sum(lengths[: job.paired_samples(lengths)])
    streams = 2 if pairs else 1
    widest = max(max(shape) for shape in _shapes(job))
    sample = streams * longest * widest * _FLOAT_BYTES
    group = samples_at_once(sample) * sample
    # While the last of a group is computed, or while the products of all are summed: then there
    # are half as large copies beside them, of the inputs in bfloat16 or of the pairs' differences.
    samples = threads * max((_SAMPLE_TENSORS - 1) * sample + group, group + group // 2)
    # Its weights have the file's type or that of the products, and those solved their codes too.
    block = _block_elements(job) * (max(job.element_bytes, linear_dtype().itemsize) + 1)
    # The same of the unquantized model go when they were passed.
    full = (streams - 1) * linear_dtype().itemsize
    most = 0
    for layer, stages in enumerate(job.blocks(1)):
        shapes = block_linear_shapes(job.model, layer)
        for stage, before, left in _held(stages, shapes):
            shared = [shapes[name] for name in stage.names]
            summed, solved = _statistics_bytes(shared, threads, pairs)
            most = max(most, summed + samples + before * full, solved + left * full)
    return block + most + _SLACK_BYTES


def _statistics_bytes(
    shapes: Sequence[tuple[int, int]], threads: int, pairs: int
) -> tuple[int, int]:
    """Return what linears with one input take while it is summed, and while they are solved."""
    if not shapes:
        return 0, 0
    inputs = shapes[0][0]
    entries = inputs * inputs
    cross = _FLOAT_BYTES if pairs and enough_pairs(pairs, inputs) else 0
    rows = max(threads * _PIECE_BYTES, max(i * o for i, o in shapes) * _WEIGHT_BYTES)
    factored = entries * (_FACTOR_BYTES + (cross if inputs < WIDE_INPUTS else 0))
    solved = entries * (_SOLVE_BYTES + cross) + rows
    return entries * (_SUM_BYTES + cross), max(factored, solved)


def _sensitivity_bytes(job: Job, lengths: Sequence[int], threads: int) -> int:
    """Return what measuring sensitivities takes at the most, without the rows that are stored."""
    longest, at_once = max(lengths), min(threads, len(lengths))
    widest = max(max(shape) for shape in _shapes(job))
    samples = at_once * _SAMPLE_TENSORS * longest * widest * _FLOAT_BYTES
    head = HEAD_ROWS * job.model.hidden_size * (job.element_bytes + _FLOAT_BYTES)
    logits = 2 * HEAD_ROWS * min(longest, HEAD_TOKENS) + 4 * longest * job.model.hidden_size
    most = head + at_once * logits * _FLOAT_BYTES
    for layer, block in enumerate(job.blocks(1)):
        shapes = block_linear_shapes(job.model, layer)
        graph = at_once * longest * _graph_width(job.model, layer) * _FLOAT_BYTES
        backward = graph + sum(i * o for i, o in shapes.values()) * _FLOAT_BYTES
        most = max(most, _forward_bytes(block, shapes, samples), backward)
    return most + _SLACK_BYTES


def _graph_width(model: ModelConfig, layer: int) -> int:
    """Return the columns of all that is kept of a token to find the gradients of a block."""
    hidden, inner, active = model.hidden_size, model.intermediate_size, 1
    if model.moe is not None and model.is_sparse(layer):
        inner, active = model.moe.intermediate_size, model.moe.num_experts_per_token
    attention = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return 3 * hidden + 2 * attention + active * (6 * inner + 3 * hidden)


def _forward_bytes(block: BlockStages, shapes: Mapping[str, tuple[int, int]], samples: int) -> int:
    """Return what a block's weights, samples and one Hessian after the other take."""
    most = 0
    for stage, before, left in _held(block, shapes):
        entries = shapes[stage.names[0]][0] ** 2 if stage.names else 0
        summed = before * _FLOAT_BYTES + samples + entries * _SUM_BYTES
        most = max(most, summed, left * _FLOAT_BYTES + entries * _FACTOR_BYTES)
    return most


def _held(
    block: BlockStages, shapes: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[Stage, int, int]]:
    """Yield the stages, and how many weights are there during their pass and behind it."""
    sizes = {name: inputs * outputs for name, (inputs, outputs) in shapes.items()}
    held = sum(sizes.values())
    for stage in block.stages:
        left = held - sum(sizes[name] for name in stage.done)
        yield stage, held, left
        held = left


def _sensitivity_rows(job: Job, lengths: Sequence[int]) -> int:
    """Return what `SensitivityRun` stores: states in front of and behind every block, and more."""
    model = job.model
    states = (model.num_layers + 1 + 2) * row_bytes(lengths, model.hidden_size)
    return states + row_bytes(lengths, max(block.wide for block in job.blocks(1)))


def _block_elements(job: Job) -> int:
    """Return the weights of the largest block."""
    return max(
        sum(i * o for i, o in block_linear_shapes(job.model, layer).values())
        for layer in range(job.num_run)
    )


def _shapes(job: Job) -> list[tuple[int, int]]:
    return [(t.in_features, t.out_features) for t in job.plan.targets]


def resident_bytes() -> int:
    """Return what the process has resident now; 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
