"""Rows of activations for one pass: in memory as far as there is room, else in nameless files."""

from collections.abc import Sequence
from pathlib import Path

from qinfer.quant.activations import FileRows, MemoryRows, Rows


class RowsStore:
    """Makes rows for the same samples; `close` lets go of their files.

    What rows hold does not depend on where they lie. Those that are made first are kept in memory.

    Args:
        folder: where files lie; they have no name there, so that nothing is left if the process
            ends.
        lengths: tokens of every sample.
        room: bytes that may be kept in memory.
    """

    def __init__(self, folder: Path, lengths: Sequence[int], *, room: int) -> None:
        self._folder = folder
        self._room = room
        self._files: list[FileRows] = []
        self.lengths = tuple(lengths)

    def make(self, name: str, width: int) -> Rows:
        """Return new rows.

        Args:
            name: for messages.
            width: largest width of a row.

        Raises:
            CheckpointError: a file cannot be made.
        """
        size = row_bytes(self.lengths, width)
        if size <= self._room:
            self._room -= size
            return MemoryRows(self.lengths, width)
        path = self._folder / f"{name}.rows"
        self._files.append(FileRows(path, self.lengths, width, unnamed=True))
        return self._files[-1]

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def row_bytes(lengths: Sequence[int], width: int) -> int:
    """Return what float32 rows of all samples take."""
    return 4 * sum(lengths) * width
