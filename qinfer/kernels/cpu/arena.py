"""Memory for weights: one anonymous mapping, in huge pages where the system offers them.

Decoding reads every weight once per step, so with 4 KiB pages the lookups of addresses cost a
noticeable part of the memory's bandwidth. Owns nothing about what is stored.
"""

import contextlib
import ctypes
import math
import mmap
import re
import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from qinfer.errors import CapacityError, ConfigError

ALIGNMENT = 64
HUGE_PAGE_BYTES = 2 << 20
_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


def aligned(num_bytes: int) -> int:
    """Return the bytes that a tensor of `num_bytes` takes up in an arena."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """A mapping from which tensors are taken one after the other and freed all together.

    It lives as long as the arena or any of its tensors. Pages become resident when first written.

    Args:
        num_bytes: room for all tensors; each takes `aligned` of its bytes.

    Raises:
        CapacityError: the system refuses that much memory.
    """

    __slots__ = ("_map", "_offset", "_stop")

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < 0:
            raise ConfigError(f"an arena of {num_bytes} bytes is not possible")
        # Room to begin at a huge page; whole pages at the end, or the last would be small ones.
        whole = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        try:
            self._map = _anonymous(whole + HUGE_PAGE_BYTES)
        except (OSError, OverflowError, ValueError) as error:
            raise CapacityError(
                f"the system refuses {num_bytes / 2**20:.0f} MiB for weights ({error}); "
                "use fewer bits, a smaller model or another machine"
            ) from error
        address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._offset = -address % HUGE_PAGE_BYTES
        self._stop = self._offset + num_bytes
        _advise(self._map)

    @property
    def free_bytes(self) -> int:
        """Bytes not taken yet."""
        return max(0, self._stop - self._offset)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the next tensor, contiguous, at a multiple of 64 bytes, filled with zeros.

        Raises:
            CapacityError: the arena was made too small.
        """
        count = math.prod(shape)
        num_bytes = count * dtype.itemsize
        if num_bytes > self.free_bytes:
            raise CapacityError(
                f"{tuple(shape)} {dtype} needs {num_bytes} bytes of an arena with "
                f"{self.free_bytes} left"
            )
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        tensor = torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._offset)
        self._offset += aligned(num_bytes)
        return tensor.view(tuple(shape))


def huge_page_bytes(addresses: Iterable[int]) -> int | None:
    """Return how much of the mappings that hold these addresses lies in huge pages.

    None where the system does not tell (only Linux does). Takes some ten milliseconds.
    """
    try:
        mappings = Path("/proc/self/smaps").read_text(encoding="utf-8")
    except OSError:
        return None
    wanted, total, inside = sorted(addresses), 0, False
    for line in mappings.splitlines():
        head = _MAPPING.match(line)
        if head is not None:
            begin, end = (bisect_left(wanted, int(part, 16)) for part in head.groups())
            inside = begin < end
        elif inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) << 10
    return total


def release_freed() -> None:
    """Give freed memory back to the system, where the C library (glibc) would keep it for later."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(ctypes.c_size_t(0))


def return_freed(num_bytes: int) -> None:
    """From now on, let new tensors of some size go back to the system as soon as they are freed.

    glibc would keep most of them, up to 32 MiB each, for later, and of what several threads free
    it can use little again. New pages cost time: a tenth of that of matrix products in tensors of
    one megabyte. Nothing happens where the C library is another.

    Args:
        num_bytes: the smallest size.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, num_bytes)


def _anonymous(num_bytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _advise(region: mmap.mmap) -> None:
    """Ask for huge pages; without them all works, only slower."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)
