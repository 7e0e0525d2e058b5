"""Interruptions: whatever write fails, and wherever a process is killed, the same call goes on."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import write_tiny

from qinfer import host
from qinfer.errors import CapacityError, CheckpointError, ConfigError
from qinfer.quant.pipeline import quantize

SMALL: dict[str, Any] = {"num_samples": 3, "seq_len": 24, "group_size": 32, "gptaq_samples": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("source") / "tiny", num_hidden_layers=3)


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("expected") / "out"
    quantize(source, out, **SMALL)
    return contents(out)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Fault:
    """Lets a number of calls that change the disk pass, then fails every one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        for owner, name in (
            (os, "write"), (os, "pwrite"), (os, "fsync"), (os, "open"), (Path, "mkdir"),
            (Path, "replace"), (Path, "rename"), (Path, "write_bytes"), (Path, "write_text"),
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*args, **kwargs)

        return call


@pytest.mark.parametrize("in_memory", [True, False])
def test_every_write_may_fail_and_nothing_is_lost(
    source: Path,
    expected: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_memory: bool,
) -> None:
    if not in_memory:
        monkeypatch.setattr(host, "available_memory", lambda: 0)
    resumed = []
    with monkeypatch.context() as patch:
        fault = Fault(patch)
        for allowed in range(5, 100_000, 31):
            fault.left = allowed
            try:
                report = quantize(source, tmp_path / "out", **SMALL)
            except (CheckpointError, ConfigError) as error:
                assert "No space left" in str(error)  # noqa: PT017 - it need not be raised
                assert not (tmp_path / "out").exists()
            else:
                resumed.append(report.resumed_at)
                break
    assert contents(tmp_path / "out") == expected
    assert not (tmp_path / "out.partial").exists()
    assert resumed[0] is not None  # with so few writes it could not be done in one run


DRIVER = """
import json, os, random, signal, sys, time, threading
from pathlib import Path
import qinfer.quant.pipeline as pipeline
from qinfer import host

source, out, seed, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
random.seed(seed)
if seed % 2:
    host.available_memory = lambda: 0

def die_at_call(count):
    left = [count]
    def wrap(owner, name):
        original = getattr(owner, name)
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        setattr(owner, name, call)
    for name in ("write", "pwrite", "fsync"):
        wrap(os, name)
    for name in ("replace", "rename", "unlink", "rmdir", "write_text"):
        wrap(Path, name)

kills = 0
while True:
    child = os.fork()
    if child == 0:
        if kills % 3 < 2:
            die_at_call(random.randrange(1, 60))
        elif kills < 30:
            delay = random.random() * 0.5
            threading.Thread(
                target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGKILL)),
                daemon=True,
            ).start()
        pipeline.quantize(source, out, threads=random.randrange(1, 4), **options)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        kills += 1
    elif os.WEXITSTATUS(status) == 0 or Path(out).exists():
        break
    else:
        sys.exit("failed")
print(kills)
"""


@pytest.mark.parametrize(
    ("seed", "gptaq"), [(0, False), (1, False), (2, True), (3, True), (4, True), (5, True)]
)
def test_killed_at_random_points_and_continued_to_the_same_bytes(
    source: Path, expected: dict[str, bytes], tmp_path: Path, seed: int, gptaq: bool
) -> None:
    options = SMALL
    if not gptaq:
        options = {**SMALL, "gptaq": False}
        quantize(source, tmp_path / "expected", **options)
        expected = contents(tmp_path / "expected")
    out = tmp_path / "out"
    run = subprocess.run(
        [sys.executable, "-c", DRIVER, str(source), str(out), str(seed), json.dumps(options)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[-1]) >= 2
    assert contents(out) == expected


def test_what_is_continued_is_said(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(source, tmp_path / "out", after="layers.1.")
    report = quantize(source, tmp_path / "out", **SMALL)
    assert "continuing at block 2 of 3" in caplog.text
    assert report.resumed_at == 1


def test_other_options_are_refused_until_restarted(source: Path, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "out", after="layers.1.")
    with pytest.raises(ConfigError, match=r"options\.asym \(false there, true here\)"):
        quantize(source, tmp_path / "out", **SMALL, asym=True)
    report = quantize(source, tmp_path / "out", **SMALL, asym=True, restart=True)
    assert report.resumed_at is None


def test_another_text_or_another_model_is_refused(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Some text. " * 40)
    interrupted(source, tmp_path / "out", after="layers.1.", calibration=text)
    text.write_text("Other text. " * 40)
    with pytest.raises(ConfigError, match="differs in calibration_tokens"):
        quantize(source, tmp_path / "out", **SMALL, calibration=text)
    text.write_text("Some text. " * 40)
    other = write_tiny(tmp_path / "other", num_hidden_layers=3, seed=1)
    with pytest.raises(ConfigError, match=r"source\.files\.model\.safetensors"):
        quantize(other, tmp_path / "out", **SMALL, calibration=text)


@pytest.mark.parametrize(("function", "what"), [("linear", "linears"), ("sum", "hessians")])
def test_another_machine_that_rounds_otherwise_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, what: str
) -> None:
    interrupted(source, tmp_path / "out", after="layers.1.")
    monkeypatch.setattr(f"qinfer.quant.fingerprint.{function}_dtype", lambda: torch.float16)
    with pytest.raises(ConfigError, match=rf"differs in arithmetic\.{what} \(.*float16"):
        quantize(source, tmp_path / "out", **SMALL)


def test_lost_hidden_states_are_named(source: Path, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "out", after="layers.1.")
    (tmp_path / "out.partial/hidden-00001.rows").unlink()
    with pytest.raises(CheckpointError, match=r"hidden-00001\.rows is missing.*--restart"):
        quantize(source, tmp_path / "out", **SMALL)


@pytest.mark.parametrize("algorithm", ["gptq", "rtn"])
def test_too_little_memory_is_refused_before_any_work(
    source: Path, tmp_path: Path, algorithm: str
) -> None:
    with pytest.raises(CapacityError, match=r"--memory 1 MB is too little: .* take about [\d,]+"):
        quantize(source, tmp_path / "out", **SMALL, memory=1_000_000, algorithm=algorithm)
    assert list(tmp_path.iterdir()) == []


def test_too_small_a_disk_is_refused_before_any_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1_000_000

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(CapacityError, match=r"disk with 1 MB free, and quantizing needs \d+ MB"):
        quantize(source, tmp_path / "out", **SMALL)
    assert list(tmp_path.iterdir()) == []


def interrupted(source: Path, out: Path, *, after: str, **options: Any) -> None:
    """Interrupt quantizing at the first module of a block."""

    def stop(step: Any) -> None:
        if after in step.note:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, out, **SMALL, on_progress=stop, **options)
