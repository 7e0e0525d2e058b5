import errno
import json
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import write_tiny
from transformers import AutoConfig

from qinfer.checkpoint import writer as writer_module
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.checkpoint.writer import COMPANIONS, CheckpointWriter
from qinfer.errors import CheckpointError, ConfigError


def copy(source: Path, out: Path, **options) -> None:
    checkpoint = open_checkpoint(source)
    with CheckpointWriter(out, **options) as writer:
        for name in checkpoint.names():
            writer.add(name, checkpoint.tensor(name))
        writer.write_json("config.json", checkpoint.config)
        writer.copy_companions(source)


@pytest.mark.parametrize("shard_bytes", [10**9, 100_000, 1])
def test_copy_is_equal_whatever_the_shards(tiny_llama: Path, tmp_path: Path, shard_bytes) -> None:
    copy(tiny_llama, tmp_path / "out", max_shard_bytes=shard_bytes)
    source, written = open_checkpoint(tiny_llama), open_checkpoint(tmp_path / "out")
    assert written.names() == source.names()
    assert written.config == source.config
    for name in source.names():
        assert torch.equal(written.tensor(name), source.tensor(name))
    files = {entry.file for entry in written.entries.values()}
    assert len(files) == {10**9: 1, 1: len(source.names())}.get(shard_bytes, len(files))
    assert all(len(load_file(file)) == 1 for file in files) == (shard_bytes == 1)
    assert not list(tmp_path.glob("*.partial"))


def test_index_names_total_size(tiny_llama: Path, tmp_path: Path) -> None:
    copy(tiny_llama, tmp_path / "out", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == open_checkpoint(tiny_llama).total_bytes


def test_equal_inputs_give_equal_bytes(tiny_llama: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        copy(tiny_llama, tmp_path / name, max_shard_bytes=100_000)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_f04_companions_travel_with_the_weights(tiny_llama: Path, tmp_path: Path) -> None:
    """F04: tokenizer, template, sampling defaults and licence."""
    source = tmp_path / "source"
    write_tiny(source)
    for name in ("LICENSE", "chat_template.jinja", "merges.txt"):
        (source / name).write_text(name)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool.jinja").write_text("x")
    (source / "training_args.bin").write_text("not copied")
    copy(source, tmp_path / "out")
    present = {name for name in COMPANIONS if (source / name).is_file()}
    assert {"tokenizer.json", "generation_config.json", "LICENSE"} <= present
    for name in [*present, "additional_chat_templates/tool.jinja"]:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "out/training_args.bin").exists()


def test_files_are_readable_by_all(tiny_llama: Path, tmp_path: Path) -> None:
    copy(tiny_llama, tmp_path / "out")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == {0o644}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_f03_views_and_tied_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    """F03: each is a contiguous copy; no "tensors share memory"."""
    base = torch.arange(24).to(dtype).reshape(4, 6)
    views = {"all": base, "same": base, "rows": base[1:3], "turned": base.T,
             "spread": base[:1].expand(4, 6)}  # fmt: skip
    with CheckpointWriter(tmp_path / "out") as writer:
        for name, view in views.items():
            writer.add(name, view)
        base_before = base.clone()
        base.zero_()
    written = load_file(tmp_path / "out/model.safetensors")
    base.copy_(base_before)
    for name, view in views.items():
        assert torch.equal(written[name], view)


def test_existing_output_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        CheckpointWriter(tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def work() -> None:
        with CheckpointWriter(tmp_path / "out", max_shard_bytes=1) as writer:
            writer.add("a", torch.zeros(4))
            writer.add("b", torch.zeros(4))
            assert list((tmp_path / "out.partial").iterdir())
            raise error

    with pytest.raises(error):
        work()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_replaced(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/stale.safetensors").write_text("x")
    copy(tiny_llama, tmp_path / "out")
    assert not (tmp_path / "out/stale.safetensors").exists()


def test_output_that_appeared_meanwhile_is_kept(tmp_path: Path) -> None:
    def work() -> None:
        with CheckpointWriter(tmp_path / "out") as writer:
            writer.add("a", torch.zeros(4))
            (tmp_path / "out").mkdir()

    with pytest.raises(ConfigError, match="made by something else"):
        work()
    assert list((tmp_path / "out").iterdir()) == []
    assert not (tmp_path / "out.partial").exists()


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("a", torch.zeros(1))
        with pytest.raises(CheckpointError, match="added twice"):
            writer.add("a", torch.zeros(1))


def test_output_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(ConfigError, match="cannot be made"),
        CheckpointWriter(tmp_path / "file/out"),
    ):
        pass


def test_a_file_in_the_way_of_the_partial_folder(tmp_path: Path) -> None:
    (tmp_path / "out.partial").write_text("x")
    with (
        pytest.raises(ConfigError, match=r"out\.partial cannot be made: Not a directory"),
        CheckpointWriter(tmp_path / "out"),
    ):
        pass


@pytest.mark.parametrize(
    ("owner", "function", "name"),
    [
        (writer_module, "save_file", "shard-00001.safetensors"),
        (Path, "write_text", "config.json"),
        (shutil, "copyfile", "tokenizer.json"),
    ],
)
def test_a_full_disk_names_the_file_and_leaves_nothing(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner, function, name
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(owner, function, fail)
    with pytest.raises(CheckpointError, match=f"{name} cannot be written: No space left"):
        copy(tiny_llama, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


HALVES = {"note": "\ud800 ü 😀", "k\udfff": ["\udc80"]}  # valid JSON, but no text in UTF-8


def test_half_a_surrogate_pair_is_written_as_it_was_read(tiny_llama: Path, tmp_path: Path) -> None:
    """With whole pairs and other letters as themselves; transformers reads the same."""
    source = tmp_path / "source"
    shutil.copytree(tiny_llama, source)
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | HALVES
    (source / "config.json").write_text(json.dumps(config), encoding="ascii")
    copy(source, tmp_path / "out")
    text = (tmp_path / "out/config.json").read_bytes().decode("utf-8")
    assert json.loads(text) == config
    assert "ü 😀" in text
    assert AutoConfig.from_pretrained(tmp_path / "out").note == HALVES["note"]
