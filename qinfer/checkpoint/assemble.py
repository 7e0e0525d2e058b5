"""Many tensors into few shards, copied piece by piece."""

from collections.abc import Iterable
from pathlib import Path

from qinfer.checkpoint.tensor_file import Piece, write_tensors
from qinfer.checkpoint.writer import DEFAULT_SHARD_BYTES, shard_files, write_index


def write_shards(
    folder: Path, pieces: Iterable[Piece], *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> None:
    """Write tensors as `model.safetensors`, or as numbered shards and their index.

    Args:
        folder: to write into.
        pieces: the tensors; the order decides which go together.
        max_shard_bytes: a shard is closed before its tensors exceed this.

    Raises:
        CheckpointError: a file cannot be written, or a piece cannot be read.
    """
    shards = _cut(pieces, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for file, shard in zip(shard_files(folder, len(shards)), shards, strict=True):
        write_tensors(file, shard)
        weight_map |= {piece.name: file.name for piece in shard}
    if len(shards) > 1:
        total = sum(piece.num_bytes for shard in shards for piece in shard)
        write_index(folder, weight_map, total)


def _cut(pieces: Iterable[Piece], max_shard_bytes: int) -> list[list[Piece]]:
    shards: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if shards[-1] and size + piece.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += piece.num_bytes
    return shards
