"""How much memory and disk quantizing takes, settled before any work is done."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from qinfer import host
from qinfer.errors import CapacityError
from qinfer.kernels.cpu.arena import release_freed
from qinfer.models.config import block_linear_shapes
from qinfer.quant.blockwise import linear_dtype
from qinfer.quant.calibration import CalibrationSet
from qinfer.quant.job import Job
from qinfer.quant.states import HIDDEN, WIDE

_FLOAT_BYTES = 4
_MIB = 2**20
_SLACK_BYTES = 128 * _MIB  # what allocators and libraries keep, small tensors, the report
_HEADER_BYTES = 32 * _MIB  # on the disk: headers, JSON files, tokenizer
_DEFAULT_SHARE = 4  # of the free memory, for activations
_SAMPLE_TENSORS = 6  # of the widest kind that a thread holds at once
# Per entry of a Hessian. While samples are summed: float32 sums. While it is factored: the Hessian,
# a float64 matrix, and the factor that is taken from it. While weights are solved: the first and
# the last. GPTAQ has one more float32 matrix throughout.
_SUM_BYTES, _FACTOR_BYTES, _SOLVE_BYTES = 4, 4 + 8 + 4, 4 + 4
_PIECE_BYTES = 64 * _MIB  # of weights that a thread solves: see `solver`
_WEIGHT_BYTES = 2 * 4  # of a linear whose error is measured: what was wanted, what it lacks


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run keeps in memory, and what it needs of the disk.

    Args:
        in_memory: activations that are kept in memory (see `states`); the others lie in files.
        disk_bytes: that the run takes at its largest.
    """

    in_memory: frozenset[str]
    disk_bytes: int

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
        streams = 2 if job.config.gptaq else 1
        hidden = streams * sum(lengths) * job.model.hidden_size * _FLOAT_BYTES
        blocks = job.blocks(1)
        wide = streams * sum(lengths) * max(block.wide for block in blocks) * _FLOAT_BYTES
        release_freed()
        work = resident_bytes() + _work_bytes(job, max(lengths), threads, streams)
        _check(memory, work)
        room = host.available_memory() // _DEFAULT_SHARE if memory is None else memory - work
        in_memory = set()
        files = 2 * hidden  # in front of and behind a block
        for name, size in ((HIDDEN, hidden), (WIDE, wide)):
            if size <= room:
                in_memory.add(name)
                room -= size
            else:
                files += size
        return Budget(frozenset(in_memory), output + files)

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


def _check(memory: int | None, needed: int) -> None:
    if memory is not None and memory < needed:
        raise CapacityError(
            f"--memory {memory / 1e6:,.0f} MB is too little: one decoder block, the statistics of "
            f"its inputs and the interpreter take about {needed / 1e6:,.0f} MB; fewer --threads "
            "or shorter samples (--seq-len) take less"
        )


def _work_bytes(job: Job, longest: int, threads: int, streams: int) -> int:
    """Return what a block takes while it is calibrated, without the samples' stored states."""
    widest = max(max(shape) for shape in _shapes(job))
    samples = threads * streams * _SAMPLE_TENSORS * longest * widest * _FLOAT_BYTES
    solving = 0
    paired = (streams - 1) * _FLOAT_BYTES
    for inputs, outputs in _shapes(job):
        entries, weight = inputs * inputs, inputs * outputs
        rows = max(threads * _PIECE_BYTES, weight * _WEIGHT_BYTES)
        summed = entries * (_SUM_BYTES + paired) + samples
        factored = entries * (_FACTOR_BYTES + paired)
        solved = entries * (_SOLVE_BYTES + paired) + rows
        solving = max(solving, summed, factored, solved)
    # Its weights have the file's type or that of the products, and those solved their codes too.
    block = _block_elements(job) * (max(job.element_bytes, linear_dtype().itemsize) + 1)
    return streams * block + solving + _SLACK_BYTES


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
