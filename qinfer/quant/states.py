"""The hidden states of the calibration samples between blocks, in memory and on the disk."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from qinfer.errors import CheckpointError
from qinfer.quant.activations import BothRows, FileRows, MemoryRows, Rows
from qinfer.quant.stages import Stream

HIDDEN, WIDE = "hidden", "wide"
WriteRows = Callable[[int, torch.Tensor], None]


class SampleStates:
    """Where the samples of one stream stand: in front of block `layer`.

    The states in front of a block always lie in a file too, from which a later run can go on; the
    exception is the first block, whose input is soon made again.

    Args:
        folder: of the files.
        kind: of the stream: "" = the quantized one, `full` = the unquantized one.
        lengths: tokens of every sample.
        hidden_size: columns of the hidden states.
        wide: columns of what linears read inside a block.
        in_memory: `HIDDEN` and `WIDE`, as far as they are kept in memory.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        lengths: Sequence[int],
        *,
        hidden_size: int,
        wide: int,
        in_memory: frozenset[str],
    ) -> None:
        self._folder, self.kind, self._lengths = folder, kind, tuple(lengths)
        self._hidden_size = hidden_size
        self._memory = MemoryRows(lengths, hidden_size) if HIDDEN in in_memory else None
        self._file: FileRows | None = None
        self._residual = self._memory or self._scratch("residual", hidden_size)
        in_file = WIDE not in in_memory
        self._wide = self._scratch(WIDE, wide) if in_file else MemoryRows(lengths, wide)

    @property
    def hidden(self) -> Rows:
        """The states in front of the block."""
        rows = self._memory or self._file
        if rows is None:
            raise ValueError("the states were neither begun nor continued")
        return rows

    def begin(self) -> Rows:
        """Return the room for the states in front of the first block."""
        if self._memory is None:
            self._file = FileRows(self._path(0), self._lengths, self._hidden_size)
        return self.hidden

    def resume(self, layer: int) -> None:
        """Take up the states that an earlier run left in front of a block.

        Raises:
            CheckpointError: they are missing or damaged.
        """
        path = self._path(layer)
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing, so block {layer} cannot be begun; start over with --restart"
            )
        self._file = FileRows(path, self._lengths, self._hidden_size)
        if path.stat().st_size != self._file.num_bytes:
            raise CheckpointError(f"{path} is damaged; start over with --restart")
        if self._memory is not None:
            for sample in range(len(self._lengths)):
                self._memory.write(sample, self._file.read(sample))

    def stream(self, weights: dict[str, torch.Tensor], lead: Stream | None) -> Stream:
        """Return the samples on their way through the block."""
        count = len(self._lengths)
        return Stream(weights, self.hidden, self._residual, self._wide, count, lead)

    def advance(self, layer: int, fill: Callable[[WriteRows], None]) -> "Advance":
        """Move on to the next block.

        Args:
            layer: the block that was passed.
            fill: writes every sample's states behind it.

        Returns:
            What remains to be done to make the new states durable.
        """
        path = self._path(layer + 1)
        following = FileRows(path.with_name(f"{path.name}.tmp"), self._lengths, self._hidden_size)
        rows: Rows = following if self._memory is None else BothRows(self._memory, following)
        fill(rows.write)
        previous, self._file = self._file, following
        return Advance(following, path, previous)

    def close(self) -> None:
        """Close the files."""
        for rows in (self._file, self._residual, self._wide):
            if isinstance(rows, FileRows):
                rows.close()

    def _path(self, layer: int) -> Path:
        suffix = f"-{self.kind}" if self.kind else ""
        return self._folder / f"{HIDDEN}-{layer:05d}{suffix}.rows"

    def _scratch(self, name: str, width: int) -> FileRows:
        suffix = f"-{self.kind}" if self.kind else ""
        path = self._folder / f"{name}{suffix}.rows"
        return FileRows(path, self._lengths, width, unnamed=True)


class Advance:
    """New states that are written, but not durable yet.

    Args:
        following: their file.
        final: the name that it will have.
        previous: the file with the states before, if there is one.
    """

    def __init__(self, following: FileRows, final: Path, previous: FileRows | None) -> None:
        self._following, self._final, self._previous = following, final, previous

    def publish(self) -> None:
        """Bring the states to the disk.

        Raises:
            CheckpointError: they cannot be written.
        """
        self._following.publish(self._final)

    def drop_previous(self) -> None:
        """Remove the states before: nothing will begin there any more."""
        if self._previous is not None:
            self._previous.close()
            with contextlib.suppress(FileNotFoundError):
                self._previous.path.unlink()


def discard_stale(folder: Path, layer: int) -> None:
    """Remove what an interrupted run left and a run that goes on at block `layer` does not need."""
    for file in [*folder.glob("*.rows"), *folder.glob("*.tmp")]:
        if not file.name.startswith(f"{HIDDEN}-{layer:05d}") or file.suffix == ".tmp":
            file.unlink()
