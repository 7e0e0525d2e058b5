"""A row's child process: what it tells, and what is said when it dies."""

import logging
import sys
from pathlib import Path

import pytest

from qinfer.errors import ConfigError, QinferError
from qinfer.workflows import isolation
from qinfer.workflows.isolation import RowRunner
from qinfer.workflows.row import RowJob

JOB = RowJob(
    model="some-model",
    engine={},
    token_ids=((1, 2, 3),),
    first_scored=(1,),
    rows_path="rows",
    vocab_size=None,
    speed=None,
)


def _child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    command = (sys.executable, "-c", f"import json, os, sys\n{code}")
    monkeypatch.setattr(isolation, "_COMMAND", command)


def _ignore(percent: int, note: str) -> None:
    pass


def test_a_crash_tells_what_the_child_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _child(monkeypatch, "sys.stderr.write('the kernel fell over'); sys.exit(3)")
    with pytest.raises(QinferError, match=r"some-model ended with exit code 3:\nthe kernel fell"):
        RowRunner(tmp_path).run(JOB, _ignore)


def test_a_killed_child_hints_at_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _child(monkeypatch, "os.kill(os.getpid(), 9)")
    with pytest.raises(QinferError, match=r"signal 9 \(SIGKILL: often because memory ran out\)"):
        RowRunner(tmp_path).run(JOB, _ignore)


def test_errors_come_back_as_their_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _child(monkeypatch, "print(json.dumps({'error': 'ConfigError', 'message': 'no such thing'}))")
    with pytest.raises(ConfigError, match="no such thing"):
        RowRunner(tmp_path).run(JOB, _ignore)
    _child(monkeypatch, "print(json.dumps({'error': 'Path', 'message': 'of another world'}))")
    with pytest.raises(QinferError, match="of another world"):
        RowRunner(tmp_path).run(JOB, _ignore)


def test_a_warning_of_several_rows_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _child(monkeypatch, "print(json.dumps({'warning': 'no C++ kernels'})); sys.exit(1)")
    runner = RowRunner(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with pytest.raises(QinferError):
                runner.run(JOB, _ignore)
    assert [record.message for record in caplog.records] == ["no C++ kernels"]


def test_a_caller_that_stops_takes_the_child_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "survived"
    _child(
        monkeypatch,
        "import time\n"
        "print(json.dumps({'percent': 1, 'note': str(os.getpid())}), flush=True)\n"
        f"time.sleep(30); open({str(marker)!r}, 'w')",
    )

    def interrupt(percent: int, note: str) -> None:
        raise KeyboardInterrupt(note)

    with pytest.raises(KeyboardInterrupt) as caught:
        RowRunner(tmp_path).run(JOB, interrupt)
    assert not Path(f"/proc/{caught.value}").exists()
    assert not marker.exists()
