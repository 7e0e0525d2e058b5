"""Which files hold a checkpoint's tensors, and what their headers promise.

Every header is read and checked against its file's size before any tensor is, so that a truncated
or missing shard is found in milliseconds and by name. Layout: 8 bytes little-endian header size,
a JSON header with `dtype`, `shape` and `data_offsets` per tensor, then the data
(https://github.com/huggingface/safetensors#format).
"""

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qinfer.checkpoint.files import list_names, read_json
from qinfer.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_PLAIN_NAME = re.compile(r"[^/\\.][^/\\]*")  # no folder, no "..", no hidden file
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies and what it is; `offset` is its first byte in a safetensors file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the data on disk."""
        return self.num_elements * self.dtype.itemsize


def index_safetensors(path: Path) -> dict[str, TensorEntry] | None:
    """Return the tensors of a directory by name; None if it has no safetensors file at all.

    Raises:
        CheckpointError: a shard is missing, truncated or damaged, or the index names a tensor
            that its shard lacks or a file outside the directory.
    """
    single = path / "model.safetensors"
    index = path / "model.safetensors.index.json"
    if single.is_file():
        return _merge([single], read_header)
    if index.is_file():
        return read_index(index, read_header)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        return None
    if len(files) > 1:
        _check_numbered(path, files)
    return _merge(files, read_header)


def read_index(
    index: Path, read: Callable[[Path], dict[str, TensorEntry]]
) -> dict[str, TensorEntry]:
    """Return the tensors of the shards that an index file names.

    Raises:
        CheckpointError: see `index_safetensors`.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file):
            raise CheckpointError(
                f"{index} places tensor {name} in {file!r}; a shard must be a plain file name in "
                "the model's own directory"
            )
    shards = sorted(set(weight_map.values()))
    missing = [file for file in shards if not (index.parent / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(shards)} shards named by {index} are missing; "
            f"download them again:{list_names(missing)}"
        )
    entries = _merge([index.parent / file for file in shards], read)
    lost = [
        f"{name} (in {file})"
        for name, file in weight_map.items()
        if name not in entries or entries[name].file.name != file
    ]
    if lost:
        raise CheckpointError(
            f"{index} names {len(lost)} tensors that their shards do not hold:{list_names(lost)}"
        )
    return entries


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors of one safetensors file by name, without reading their data.

    Raises:
        CheckpointError: the file is truncated, or its header is damaged.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{file} is truncated or no safetensors file: {size} bytes, header of {length}"
            )
        try:
            header = json.loads(stream.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise CheckpointError(f"{file} has a damaged header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a damaged header: no JSON object")
    header.pop("__metadata__", None)
    entries: dict[str, TensorEntry] = {}
    end = 0
    for name, facts in header.items():
        if not _is_text(name):
            raise CheckpointError(f"{file}: the tensor name {name!r} holds half a surrogate pair")
        entries[name], stop = _entry(file, name, facts, 8 + length)
        end = max(end, stop)
    if 8 + length + end != size:
        state = "truncated" if size < 8 + length + end else "longer than its header says"
        raise CheckpointError(
            f"{file} is {state}: {size} bytes, its header promises {8 + length + end}; "
            "download or copy it again"
        )
    return entries


def _is_text(name: str) -> bool:
    """Tell whether UTF-8 can spell a name; JSON can spell more."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _entry(file: Path, name: str, facts: Any, data: int) -> tuple[TensorEntry, int]:
    """Return a tensor's place and where it stops, in a file whose data begin at byte `data`."""
    try:
        dtype, shape = DTYPES.get(facts["dtype"]), tuple(int(size) for size in facts["shape"])
        start, stop = (int(offset) for offset in facts["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} has a damaged header entry for tensor {name}") from error
    if dtype is None:
        raise CheckpointError(f"{file}: tensor {name} has unsupported type {facts['dtype']!r}")
    entry = TensorEntry(file, dtype, shape, data + start)
    if start < 0 or stop - start != entry.num_bytes:
        raise CheckpointError(
            f"{file} has a damaged header: tensor {name} of shape {shape} and type "
            f"{facts['dtype']} has {stop - start} bytes"
        )
    return entry, stop


def _merge(
    files: Iterable[Path], read: Callable[[Path], dict[str, TensorEntry]]
) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read(file).items():
            if name in entries:
                raise CheckpointError(
                    f"tensor {name} is in both {entries[name].file.name} and {file.name} of "
                    f"{file.parent}"
                )
            entries[name] = entry
    return entries


def _check_numbered(path: Path, files: list[Path]) -> None:
    """Refuse several files without an index unless they are one complete numbered set."""
    matches = [_NUMBERED.fullmatch(file.name) for file in files]
    stems = {(match[1], match[3]) for match in matches if match}
    if len(stems) != 1 or not all(matches):
        raise CheckpointError(
            f"{path} holds several safetensors files but no model.safetensors.index.json that "
            f"says which belong together:{list_names([file.name for file in files])}"
        )
    total = int(next(iter(stems))[1])
    if len(files) != total:
        raise CheckpointError(f"{path} holds {len(files)} of {total} safetensors shards")
