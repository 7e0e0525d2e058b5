from pathlib import Path

import pytest
import torch
from support.checkpoints import write_tiny
from support.gguf_files import write_gguf

from qinfer.checkpoint.convert import convert_model
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import CheckpointError


def test_directories_are_copied_as_they_are(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "qwen2", dtype=torch.float16)
    seen: list[tuple[int, int]] = []
    convert_model(
        source, tmp_path / "out", max_shard_bytes=50_000,
        on_progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert before.config == after.config
    assert before.names() == after.names()
    assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in before.names())
    assert seen == [(i, len(before.names())) for i in range(1, len(before.names()) + 1)]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_gguf_progress_counts_tensors(tiny_llama: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert_model(
        write_gguf(tiny_llama, tmp_path / "m.gguf", "llama"), tmp_path / "out",
        on_progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen[-1] == (21, 21)


def test_nothing_is_left_when_a_tensor_cannot_be_read(tmp_path: Path, monkeypatch) -> None:
    source = write_tiny(tmp_path / "source")

    def vanish(done: int, total: int) -> None:
        (source / "model.safetensors").unlink(missing_ok=True)

    with pytest.raises(CheckpointError, match=r"tensor .* cannot be read"):
        convert_model(source, tmp_path / "out", on_progress=vanish)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
