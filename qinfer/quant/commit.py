"""Makes finished blocks durable in a thread of its own, while the next one is computed.

A block's hidden states reach the disk before its tensors do, so where a block's file exists, work
can go on behind it.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self

import torch

from qinfer.checkpoint.partial import PartialDirectory
from qinfer.checkpoint.tensor_file import tensor_piece
from qinfer.quant.report import ModuleRow
from qinfer.quant.states import Advance


@dataclass(frozen=True, slots=True, eq=False)
class FinishedBlock:
    """A block that was solved.

    Args:
        layer: its index.
        tensors: by full name, those that differ from the source.
        rows: of the modules that were quantized.
        facts: further JSON values to keep with the block.
        advances: the hidden states behind it.
    """

    layer: int
    tensors: dict[str, torch.Tensor]
    rows: tuple[ModuleRow, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    advances: tuple[Advance, ...] = ()


class Committer:
    """Writes blocks one at a time, in order; use it in a `with` block.

    Args:
        partial: where they go.
    """

    def __init__(self, partial: PartialDirectory) -> None:
        self._partial = partial
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._running: Future[None] | None = None

    def __enter__(self) -> Self:
        """Start."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the last block, whose error is raised unless there is one already."""
        try:
            if kind is None:
                self._wait()
        finally:
            self._pool.shutdown()

    def submit(self, block: FinishedBlock) -> None:
        """Wait for the block before, then start to write this one.

        Raises:
            CheckpointError: the block before could not be written.
        """
        self._wait()
        self._running = self._pool.submit(self._write, block)

    def _wait(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def _write(self, block: FinishedBlock) -> None:
        for advance in block.advances:
            advance.publish()
        pieces = [tensor_piece(name, tensor) for name, tensor in block.tensors.items()]
        facts = {"rows": [asdict(row) for row in block.rows], **block.facts}
        self._partial.write_block(block.layer, pieces, facts)
        for advance in block.advances:
            advance.drop_previous()


def kept_rows(partial: PartialDirectory, layer: int) -> tuple[ModuleRow, ...]:
    """Return the rows of a finished block.

    Raises:
        CheckpointError: its file is damaged.
    """
    return tuple(ModuleRow(**row) for row in partial.block_facts(layer)["rows"])
