"""Where the calibration samples' activations lie between passes: in memory, or in a file.

Files are read and written, never mapped, so that what is spilled does not count as memory of the
process. Every sample has its own place, so threads may work on different samples at once.
"""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, overload

import torch

from qinfer.checkpoint.durable import sync_folder, writing
from qinfer.checkpoint.tensor_file import bytes_of

_ELEMENT_BYTES = 4  # float32


class Rows(Protocol):
    """Float32 rows of every sample, `[tokens, width]`."""

    def read(self, sample: int, width: int | None = None) -> torch.Tensor:
        """Return a sample's rows, not to be changed; `width` as written, None = the largest."""
        ...

    def write(self, sample: int, values: torch.Tensor) -> None:
        """Keep a copy of a sample's rows, at most as wide as there is room for."""
        ...


class MemoryRows:
    """Rows in memory, allocated once.

    Args:
        lengths: tokens of every sample.
        width: largest width of a row.
    """

    def __init__(self, lengths: Sequence[int], width: int) -> None:
        self._lengths = tuple(lengths)
        self._width = width
        self._starts = [0, *itertools.accumulate(lengths)]
        self._values = torch.empty(self._starts[-1] * width)

    def read(self, sample: int, width: int | None = None) -> torch.Tensor:
        """Return a view of a sample's rows, `[tokens, width]`."""
        width = width or self._width
        start, length = self._starts[sample] * self._width, self._lengths[sample]
        return self._values[start : start + length * width].view(length, width)

    def write(self, sample: int, values: torch.Tensor) -> None:
        """Copy a sample's rows in."""
        self.read(sample, values.shape[1]).copy_(values)


class FileRows:
    """Rows in a file.

    Args:
        path: of the file; made if it does not exist.
        lengths: tokens of every sample.
        width: largest width of a row.
        unnamed: take the file's name away at once, so that it is gone when the process is.

    Raises:
        CheckpointError: the file cannot be opened.
    """

    def __init__(
        self, path: Path, lengths: Sequence[int], width: int, *, unnamed: bool = False
    ) -> None:
        self.path = path
        self._lengths = tuple(lengths)
        self._width = width
        self._starts = [0, *itertools.accumulate(lengths)]
        with writing(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if unnamed:
                path.unlink()

    @property
    def num_bytes(self) -> int:
        """Size of the file when every sample is in it."""
        return self._starts[-1] * self._width * _ELEMENT_BYTES

    def read(self, sample: int, width: int | None = None) -> torch.Tensor:
        """Read a sample's rows into memory of their own.

        Raises:
            CheckpointError: the file is shorter than what was written.
        """
        values = torch.empty(self._lengths[sample], width or self._width)
        room = bytes_of(values)
        offset = self._starts[sample] * self._width * _ELEMENT_BYTES
        with writing(self.path):
            while room:
                count = os.preadv(self._file, [room], offset)
                if count == 0:
                    raise OSError(0, "it became shorter while it was in use")
                room, offset = room[count:], offset + count
        return values

    def write(self, sample: int, values: torch.Tensor) -> None:
        """Write a sample's rows.

        Raises:
            CheckpointError: they cannot be written; the disk may be full.
        """
        left = bytes_of(values.contiguous())
        offset = self._starts[sample] * self._width * _ELEMENT_BYTES
        with writing(self.path):
            while left:
                count = os.pwrite(self._file, left, offset)
                left, offset = left[count:], offset + count

    def publish(self, final: Path) -> None:
        """Wait until everything written is on the disk, then give the file its final name.

        Raises:
            CheckpointError: it cannot be written.
        """
        with writing(self.path):
            os.fsync(self._file)
            self.path.replace(final)
            sync_folder(final.parent)
        self.path = final

    def close(self) -> None:
        """Close the file; it stays where it is."""
        os.close(self._file)


class BothRows:
    """Rows that are kept in memory and written to a file too: read from memory."""

    def __init__(self, memory: MemoryRows, file: FileRows) -> None:
        self._memory, self._file = memory, file

    def read(self, sample: int, width: int | None = None) -> torch.Tensor:
        """Return a view of a sample's rows in memory."""
        return self._memory.read(sample, width)

    def write(self, sample: int, values: torch.Tensor) -> None:
        """Write a sample's rows to both."""
        self._memory.write(sample, values)
        self._file.write(sample, values)


class SampleSequence(Sequence[torch.Tensor]):
    """The rows of all samples, read when they are asked for."""

    def __init__(self, rows: Rows, count: int) -> None:
        self._rows, self._count = rows, count

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._count

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        """Return one sample's rows, or those of several."""
        if isinstance(index, slice):
            return [self[sample] for sample in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self._rows.read(index % self._count)
