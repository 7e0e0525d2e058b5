"""Unfinished work in `OUT.partial`: whose it is, what survives, how it becomes the checkpoint."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from qinfer.checkpoint.partial import PartialDirectory
from qinfer.checkpoint.tensor_file import tensor_piece
from qinfer.errors import CheckpointError, ConfigError

RUN = {"qinfer": "1", "options": {"bits": 4, "samples": 128}}


def finish_block(partial: PartialDirectory, index: int) -> None:
    partial.write_block(index, [tensor_piece("a", torch.full((3,), index))], {"index": index})


def left_with_blocks(out: Path, count: int) -> None:
    """Leave a folder as an interrupted run does."""

    def work() -> None:
        with PartialDirectory(out) as partial:
            partial.claim(RUN)
            for index in range(count):
                finish_block(partial, index)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()


def test_finished_blocks_survive_and_are_taken_over(tmp_path: Path) -> None:
    left_with_blocks(tmp_path / "out", 2)
    (tmp_path / "out.partial/block-00002.safetensors.tmp").write_text("half")
    with PartialDirectory(tmp_path / "out") as partial:
        partial.claim(RUN)
        assert partial.finished_blocks() == {0, 1}
        assert partial.block_facts(1) == {"index": 1}
        assert partial.block_entries(1)["a"].shape == (3,)
        assert partial.read_note("absent") is None
        partial.write_note("plan", [1, 2])
        assert partial.read_note("plan") == [1, 2]


def test_a_folder_without_a_finished_block_is_removed(tmp_path: Path) -> None:
    left_with_blocks(tmp_path / "out", 0)
    assert list(tmp_path.iterdir()) == []


def test_the_work_of_another_run_is_refused_and_kept(tmp_path: Path) -> None:
    left_with_blocks(tmp_path / "out", 1)
    other = {"qinfer": "1", "options": {"bits": 8, "samples": 128}}
    with (
        pytest.raises(
            ConfigError,
            match=r"holds .* differs in options\.bits \(4 there, 8 here\); .*--restart",
        ),
        PartialDirectory(tmp_path / "out") as partial,
    ):
        partial.claim(other)
    with PartialDirectory(tmp_path / "out") as partial:
        partial.claim(RUN)
        assert partial.finished_blocks() == {0}
    with PartialDirectory(tmp_path / "out", restart=True) as partial:
        partial.claim(other)
        assert partial.finished_blocks() == set()


def test_many_differences_are_counted(tmp_path: Path) -> None:
    left_with_blocks(tmp_path / "out", 1)
    with (
        pytest.raises(ConfigError, match=r"and 3 more; run"),
        PartialDirectory(tmp_path / "out") as partial,
    ):
        partial.claim({f"{i}": "x" * 99 for i in range(6)})


def hold(path: Path, locked: "multiprocessing.synchronize.Event", seconds: float) -> None:
    with PartialDirectory(path):
        locked.set()
        multiprocessing.Event().wait(seconds)


def test_two_processes_never_share_a_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    locked = context.Event()
    process = context.Process(target=hold, args=(tmp_path / "out", locked, 60))
    process.start()
    assert locked.wait(60)
    with (
        pytest.raises(ConfigError, match="another process is working in"),
        PartialDirectory(tmp_path / "out"),
    ):
        pass
    process.kill()  # the lock ends with its process, however that ends
    process.join()
    with PartialDirectory(tmp_path / "out") as partial:
        partial.claim(RUN)


def test_the_result_replaces_the_folder(tmp_path: Path) -> None:
    with PartialDirectory(tmp_path / "out") as partial:
        partial.claim(RUN)
        finish_block(partial, 0)
        (partial.begin_result() / "stale").write_text("x")
        folder = partial.begin_result()
        (folder / "config.json").write_text("{}")
        partial.publish_result()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "config.json"]


def test_an_output_that_appeared_meanwhile_is_kept(tmp_path: Path) -> None:
    def work() -> None:
        with PartialDirectory(tmp_path / "out") as partial:
            partial.claim(RUN)
            finish_block(partial, 0)
            partial.begin_result()
            (tmp_path / "out").mkdir()
            partial.publish_result()

    with pytest.raises(ConfigError, match="exists already"):
        work()
    assert list((tmp_path / "out").iterdir()) == []
    assert (tmp_path / "out.partial/block-00000.safetensors").exists()


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(ConfigError, match="cannot be made: Not a directory"),
        PartialDirectory(tmp_path / "file/out"),
    ):
        pass
    (tmp_path / "out.partial").write_text("x")
    with pytest.raises(ConfigError, match="cannot be made"), PartialDirectory(tmp_path / "out"):
        pass
    with pytest.raises(ConfigError, match="exists already"):
        PartialDirectory(tmp_path / "file")


def test_a_damaged_block_is_named(tmp_path: Path) -> None:
    left_with_blocks(tmp_path / "out", 1)
    (tmp_path / "out.partial/block-00000.safetensors").write_text("x")
    with PartialDirectory(tmp_path / "out") as partial:
        partial.claim(RUN)
        with pytest.raises(CheckpointError, match=r"block-00000\.safetensors"):
            partial.block_facts(0)
