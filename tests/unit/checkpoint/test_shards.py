import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import write_tiny

from qinfer.checkpoint.shards import DTYPES, index_safetensors, read_header
from qinfer.errors import CheckpointError


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model", max_shard_size="100KB")


def index_of(path: Path) -> Path:
    return path / "model.safetensors.index.json"


def test_every_type(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(3, 2).to(dtype) for name, dtype in DTYPES.items()}, file)
    entries = read_header(file)
    assert {name: entry.dtype for name, entry in entries.items()} == DTYPES
    assert all(entry.shape == (3, 2) for entry in entries.values())
    assert entries["BF16"].num_bytes == 12


@pytest.mark.parametrize("cut", [1, 1000, 10_000])
def test_truncated_shard(sharded: Path, cut: int) -> None:
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=rf"{file.name} is truncated: .* promises"):
        index_safetensors(sharded)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, b"<!DOCTYPE html> not found"])
def test_no_safetensors_at_all(sharded: Path, content: bytes) -> None:
    file = min(sharded.glob("*.safetensors"))
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{file.name} is truncated or no safetensors"):
        index_safetensors(sharded)


def write_raw(path: Path, header: object, data: bytes = b"") -> None:
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("{not json", "damaged header"),
        ([1], "no JSON object"),
        ({"w": {"dtype": "F32"}}, "damaged header entry for tensor w"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, "damaged header entry"),
        ({"w\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "half a surrogate"),
        ({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}}, "unsupported type 'F4'"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "has 4 bytes"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "longer than its header"),
    ],
)
def test_corrupt_header(tmp_path: Path, header: object, message: str) -> None:
    write_raw(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=message):
        index_safetensors(tmp_path)


def test_missing_shards_are_named(sharded: Path) -> None:
    files = sorted(sharded.glob("*.safetensors"))
    files[0].unlink()
    files[2].unlink()
    with pytest.raises(CheckpointError, match=rf"2 of {len(files)} shards(.|\n)*{files[2].name}"):
        index_safetensors(sharded)


def test_index_that_names_a_tensor_its_shard_lacks(sharded: Path) -> None:
    index = json.loads(index_of(sharded).read_text())
    first = next(iter(index["weight_map"].values()))
    index["weight_map"]["ghost.weight"] = first
    index_of(sharded).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"1 tensors(.|\n)*ghost\.weight"):
        index_safetensors(sharded)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "a\\b", "", 7, None]
)
def test_index_that_points_outside_the_directory(sharded: Path, name: object) -> None:
    index = json.loads(index_of(sharded).read_text())
    index["weight_map"]["lm_head.weight"] = name
    index_of(sharded).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="plain file name"):
        index_safetensors(sharded)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_index_without_a_map(sharded: Path, content: str) -> None:
    index_of(sharded).write_text(content)
    with pytest.raises(CheckpointError, match="no weight_map"):
        index_safetensors(sharded)


def test_numbered_shards_without_an_index(sharded: Path) -> None:
    expected = index_safetensors(sharded)
    index_of(sharded).unlink()
    assert index_safetensors(sharded) == expected
    max(sharded.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"holds \d of \d safetensors shards"):
        index_safetensors(sharded)


def test_unrelated_files_without_an_index(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="several safetensors files but no"):
        index_safetensors(tmp_path)


def test_one_file_of_any_name(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "gptq_model-4bit-128g.safetensors")
    entries = index_safetensors(tmp_path)
    assert entries is not None
    assert list(entries) == ["w"]


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({"w": torch.zeros(1)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="tensor w is in both"):
        index_safetensors(tmp_path)


def test_no_file(tmp_path: Path) -> None:
    assert index_safetensors(tmp_path) is None


def test_deeply_nested_json_is_damage(sharded: Path, tmp_path: Path) -> None:
    nested = b"[" * 200_000
    index_of(sharded).write_bytes(nested)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        index_safetensors(sharded)
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(nested).to_bytes(8, "little") + nested)
    with pytest.raises(CheckpointError, match="damaged header"):
        read_header(file)
