"""Safetensors files written piece by piece, read back by the library."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qinfer.checkpoint import tensor_file
from qinfer.checkpoint.assemble import write_shards
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.checkpoint.shards import DTYPES, read_header
from qinfer.checkpoint.tensor_file import (
    entry_piece,
    read_metadata,
    source_piece,
    tensor_piece,
    write_tensors,
)
from qinfer.errors import CheckpointError

_SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
_TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12),
    st.tuples(_SHAPES, st.sampled_from([torch.int8, torch.bfloat16, torch.int32, torch.float64])),
    max_size=6,
).filter(lambda tensors: "__metadata__" not in tensors)


def random_tensors(facts: dict) -> dict[str, torch.Tensor]:
    return {name: torch.randint(-9, 9, shape).to(dtype) for name, (shape, dtype) in facts.items()}


@given(_TENSORS)
def test_the_library_reads_what_is_written(tmp_path_factory: pytest.TempPathFactory, facts) -> None:
    file = tmp_path_factory.mktemp("file") / "a.safetensors"
    tensors = random_tensors(facts)
    write_tensors(file, [tensor_piece(name, tensor) for name, tensor in tensors.items()])
    read = load_file(file)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_the_bytes_are_those_of_the_library_and_of_any_order(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3, dtype=torch.bfloat16), "a": torch.ones(2, dtype=torch.int8),
               "c": torch.ones(2, 2), "d": torch.zeros(4, dtype=torch.int32)}  # fmt: skip
    pieces = [tensor_piece(name, tensor) for name, tensor in tensors.items()]
    write_tensors(tmp_path / "ours", pieces)
    write_tensors(tmp_path / "reversed", pieces[::-1])
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    ours = (tmp_path / "ours").read_bytes()
    assert ours == (tmp_path / "reversed").read_bytes()
    assert ours == (tmp_path / "theirs").read_bytes()


def test_metadata(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    write_tensors(file, [tensor_piece("a", torch.ones(1))], metadata={"facts": '{"é": 1}'})
    assert read_metadata(file) == {"format": "pt", "facts": '{"é": 1}'}
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == read_metadata(file)
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="damaged header"):
        read_metadata(file)


def test_copies_go_in_small_pieces(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "COPY_BYTES", 1000)
    checkpoint = open_checkpoint(tiny_llama)
    largest = 0
    for name in checkpoint.names():
        for data in source_piece(checkpoint, name).read():
            largest = max(largest, len(data))
    assert largest == 1000
    write_shards(tmp_path, [source_piece(checkpoint, name) for name in checkpoint.names()])
    copied = load_file(tmp_path / "model.safetensors")
    assert copied.keys() == set(checkpoint.names())
    for name, tensor in copied.items():
        assert torch.equal(tensor, checkpoint.tensor(name))


def test_shards_and_their_index(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama)
    pieces = [source_piece(checkpoint, name) for name in checkpoint.names()]
    write_shards(tmp_path, pieces, max_shard_bytes=100_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == checkpoint.total_bytes
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == sorted(set(index["weight_map"].values()))
    for file in files:
        sizes = [entry.num_bytes for entry in read_header(file).values()]
        assert sum(sizes) <= 100_000 or len(sizes) == 1


def test_a_source_that_shrinks_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1000)}, file)
    entry = read_header(file)["a"]
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"a\.safetensors: tensor a .* became shorter"):
        write_tensors(tmp_path / "b", [entry_piece("a", entry)])


def test_every_type_that_is_read_is_written(tmp_path: Path) -> None:
    for name, dtype in DTYPES.items():
        file = tmp_path / name
        write_tensors(file, [tensor_piece("a", torch.ones(3).to(dtype))])
        assert read_header(file)["a"].dtype == dtype
