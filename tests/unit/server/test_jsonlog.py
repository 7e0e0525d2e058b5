"""The log's promise: never in the way, never silently wrong."""

import json
import logging
import os
import threading

import pytest

from qinfer.server import jsonlog
from qinfer.server.jsonlog import JsonLog


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_objects_with_the_time(tmp_path):
    path = tmp_path / "log"
    log = JsonLog(str(path))
    for number in range(1000):
        log.write({"number": number, "text": "zwei\nZeilen"})
    log.close()
    assert [entry["number"] for entry in lines(path)] == list(range(1000))
    assert all(entry["time"].endswith("+00:00") for entry in lines(path))
    assert (log.written, log.dropped) == (1000, 0)
    assert path.stat().st_mode & 0o007 == 0  # not for everybody's eyes


def test_a_rotated_file_is_followed(tmp_path):
    path, old = tmp_path / "log", tmp_path / "log.1"
    log = JsonLog(str(path))
    log.write({"n": 1})
    wait_until(lambda: log.written == 1)
    path.rename(old)
    log.write({"n": 2})
    wait_until(lambda: log.written == 2)
    path.unlink()
    log.write({"n": 3})
    log.close()
    assert [entry["n"] for entry in lines(old)] == [1]
    assert [entry["n"] for entry in lines(path)] == [3]


def test_a_full_disk_costs_lines_and_one_warning(caplog):
    log = JsonLog("/dev/full")
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            log.write({"number": number})
            wait_until(lambda seen=number: log.dropped == seen + 1)
        log.close()
    assert (log.written, log.dropped) == (0, 5)
    assert len(caplog.records) == 1
    assert "/dev/full" in caplog.text
    assert "No space left" in caplog.text


def test_when_there_is_room_again_the_log_goes_on_with_a_whole_line(tmp_path, monkeypatch):
    path = tmp_path / "log"
    room = [10]

    def write(fd, data):
        """A disk with `room` bytes left."""
        part = data[: room[0]]
        if data and not part:
            raise OSError(28, "No space left on device")
        room[0] -= len(part)
        return real(fd, part)

    real = os.write
    monkeypatch.setattr(os, "write", write)
    log = JsonLog(str(path))
    log.write({"n": 1})
    wait_until(lambda: log.dropped == 1)
    log.write({"n": 2})
    wait_until(lambda: log.dropped == 2)
    room[0] = 10_000
    log.write({"n": 3})
    log.close()
    torn, *whole = path.read_text().splitlines()
    assert len(torn) == 10
    assert [json.loads(line)["n"] for line in whole] == [3]
    assert (log.written, log.dropped) == (1, 2)


def test_a_line_torn_by_kill_9_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"n": 1}\n{"n":')
    log = JsonLog(str(path))
    log.write({"n": 2})
    log.close()
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()[::2]] == [1, 2]


def test_a_stuck_disk_holds_up_nobody(tmp_path, monkeypatch):
    stuck = threading.Event()
    real = os.write

    def write(fd, data):
        stuck.wait(30)
        return real(fd, data)

    monkeypatch.setattr(jsonlog, "QUEUE_LINES", 10)
    monkeypatch.setattr(os, "write", write)
    log = JsonLog(str(tmp_path / "log"))
    for number in range(100):
        log.write({"number": number})  # returns at once, or the test would take 30 seconds
    assert log.dropped >= 100 - 10 - jsonlog.BATCH_LINES
    stuck.set()
    log.close()
    assert log.written + log.dropped == 100


def test_a_log_that_cannot_be_opened_is_told_at_the_start(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        JsonLog(str(tmp_path / "none" / "log"))


def wait_until(condition):
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("the log does not come to rest")
