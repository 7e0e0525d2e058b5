"""Drawing tokens from rows of logits with the C++ kernel; `csrc/sample.h` says what it computes."""

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import torch

from qinfer.errors import ConfigError
from qinfer.kernels.cpu.program import OpKind, Program, pointer
from qinfer.kernels.sampling import Draw

_CHUNK = 64  # QINFER_SAMPLE_CHUNK


class DrawArgs(ctypes.Structure):
    """`qinfer_draw`."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("edited", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("allowed", ctypes.c_void_p),
        ("num_edits", ctypes.c_int64),
        ("number", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("top_k", ctypes.c_int64),
        ("temperature", ctypes.c_float),
        ("log_min_p", ctypes.c_float),
    )


class SampleArgs(ctypes.Structure):
    """`qinfer_sample`."""

    _fields_ = (
        ("draws", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("workers", ctypes.c_int64),
        ("num_draws", ctypes.c_void_p),
    )


class NativeSampler:
    """Chooses tokens from rows of one width.

    Args:
        vocab_size: width of a row.
        threads: size of the thread team.
    """

    def __init__(self, vocab_size: int, threads: int) -> None:
        self._vocab_size = vocab_size
        self._threads = threads
        chunks = -(-vocab_size // _CHUNK)
        size = chunks * 2 * _CHUNK + -(-chunks // 16) * 16  # QINFER_SAMPLE_SCRATCH
        self._scratch = torch.zeros(threads, size)
        self._num_draws = torch.zeros(1, dtype=torch.int64)
        self._capacity = 0

    @staticmethod
    def unsupported_reason(draw: Draw) -> str | None:
        """Return why a draw needs the reference, or None if it does not."""
        return "typical sampling is not one threshold" if draw.typical_p < 1.0 else None

    def choose(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """Return the token of each draw, or -1 where no token is left to choose.

        Args:
            logits: float32 `[rows, vocab]` on the CPU; what a draw leaves of its row is finite.
            draws: supported ones, whose rows, edits and bits lie inside.

        Raises:
            ConfigError: the logits are not such rows.
        """
        if not draws:
            return []
        pointer("logits", logits, torch.float32, (logits.shape[0], self._vocab_size))
        self._reserve(len(draws))
        base, stride = logits.data_ptr(), 4 * self._vocab_size
        for entry, draw in zip(self._draws, draws, strict=False):
            if not 0 <= draw.row < logits.shape[0]:
                raise ConfigError(f"draw from row {draw.row} of {logits.shape[0]}")
            entry.logits = base + draw.row * stride
            entry.number = draw.number
            entry.temperature = draw.temperature
            entry.top_k = min(draw.top_k, self._vocab_size)
            entry.top_p = draw.top_p
            entry.log_min_p = math.log(draw.min_p) if draw.min_p > 0 else -math.inf
            self._point_at(entry, draw)
        self._num_draws[0] = len(draws)
        self._program.run(self._threads)
        chosen: list[int] = self._out[: len(draws)].tolist()
        return chosen

    def _point_at(self, entry: DrawArgs, draw: Draw) -> None:
        """Write down where a draw's edits and bits lie; they live as long as `draw`."""
        edits, allowed = draw.edits, draw.allowed
        if edits is None:
            entry.num_edits = 0
        else:
            ids = edits.token_ids
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
                raise ConfigError(f"edits name a token outside 0:{self._vocab_size}")
            entry.num_edits = ids.size
            entry.edited = _address("token_ids", ids, np.int64, ids.size)
            entry.values = _address("values", edits.values, np.float32, ids.size)
        words = -(-self._vocab_size // 32)
        entry.allowed = None if allowed is None else _address("allowed", allowed, np.uint32, words)

    def _reserve(self, count: int) -> None:
        """Make room for that many draws."""
        if count <= self._capacity:
            return
        self._capacity = max(16, 1 << (count - 1).bit_length())
        self._draws = (DrawArgs * self._capacity)()
        self._out = torch.zeros(self._capacity, dtype=torch.int64)
        args = SampleArgs(
            draws=ctypes.addressof(self._draws),
            out=self._out.data_ptr(),
            scratch=self._scratch.data_ptr(),
            size=self._vocab_size,
            workers=self._threads,
            num_draws=self._num_draws.data_ptr(),
        )
        self._program = Program()
        self._program.add(OpKind.SAMPLE, args)


def _address(name: str, array: np.ndarray, dtype: type[np.generic], size: int) -> int:
    if array.dtype != dtype or array.shape != (size,) or not array.flags.c_contiguous:
        raise ConfigError(
            f"{name} is {array.shape} {array.dtype}; it must be contiguous ({size},) "
            f"{np.dtype(dtype)}"
        )
    address: int = array.ctypes.data
    return address
