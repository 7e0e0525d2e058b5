"""Safetensors files written piece by piece: a tensor need never be in memory as a whole.

Layout: 8 bytes little-endian header size, a JSON header, then the data
(https://github.com/huggingface/safetensors#format). As in the library's own writer, tensors with
wider elements come first, then by name, so that every one is aligned.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from qinfer.checkpoint.durable import Buffer, write_all, writing
from qinfer.checkpoint.reader import Checkpoint
from qinfer.checkpoint.shards import DTYPES, TensorEntry
from qinfer.errors import CheckpointError

COPY_BYTES = 8 * 2**20
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a file to write, and where its bytes come from.

    Args:
        name: of the tensor.
        dtype: of its elements.
        shape: its shape.
        read: yields its bytes in order.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Iterator[Buffer]]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_piece(name: str, tensor: torch.Tensor) -> Piece:
    """Return a piece that is in memory."""

    def read() -> Iterator[Buffer]:
        if tensor.numel():
            yield bytes_of(tensor.detach().contiguous())

    return Piece(name, tensor.dtype, tuple(tensor.shape), read)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, which is not empty, as bytes."""
    return tensor.flatten().view(torch.uint8).numpy().data


def entry_piece(name: str, entry: TensorEntry) -> Piece:
    """Return a piece that is copied from a safetensors file, `COPY_BYTES` at a time."""

    def read() -> Iterator[Buffer]:
        left = entry.num_bytes
        try:
            with entry.file.open("rb", buffering=0) as file:
                file.seek(entry.offset)
                while left:
                    data = file.read(min(left, COPY_BYTES))
                    if not data:
                        raise CheckpointError(
                            f"{entry.file}: tensor {name} cannot be read: the file became shorter "
                            "after it was opened"
                        )
                    yield data
                    left -= len(data)
        except OSError as error:
            raise CheckpointError(f"{entry.file}: tensor {name} cannot be read: {error}") from error

    return Piece(name, entry.dtype, entry.shape, read)


def source_piece(checkpoint: Checkpoint, name: str) -> Piece:
    """Return a piece that is a tensor of a checkpoint, unchanged."""
    entry = checkpoint.entries[name]
    if entry.file.suffix == ".safetensors":
        return entry_piece(name, entry)

    def read() -> Iterator[Buffer]:
        yield from tensor_piece(name, checkpoint.tensor(name)).read()

    return Piece(name, entry.dtype, entry.shape, read)


def write_tensors(
    file: Path, pieces: Iterable[Piece], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file; the same pieces in any order give the same bytes.

    Args:
        file: to write; it is replaced if it exists.
        pieces: its tensors.
        metadata: text that goes into the header.

    Raises:
        CheckpointError: it cannot be written, or a piece cannot be read.
    """
    ordered = sorted(pieces, key=lambda piece: (-piece.dtype.itemsize, piece.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for piece in ordered:
        end = offset + piece.num_bytes
        header[piece.name] = {
            "dtype": _DTYPE_NAMES[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with writing(file):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(file, flags, 0o644)
        try:
            write_all(descriptor, len(text).to_bytes(8, "little") + text)
            for piece in ordered:
                for data in piece.read():
                    write_all(descriptor, data)
        finally:
            os.close(descriptor)


def read_metadata(file: Path) -> dict[str, str]:
    """Return the text in the header of a safetensors file that `write_tensors` wrote.

    Raises:
        CheckpointError: the file cannot be read, or its header is damaged.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, file.stat().st_size)))
        return dict(header["__metadata__"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} has a damaged header: {error}") from error
