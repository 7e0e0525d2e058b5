"""JSON lines into a file, written by a thread of their own: logging never holds up a request.

What happens when things go wrong is part of the contract. The queue is bounded: lines beyond it
are dropped and counted. A file that cannot be written (a full disk, a lost mount) costs its lines,
which are counted too, and one warning; the service goes on, and so does the log as soon as there
is room again. A file that was renamed or removed, as log rotation does, is opened anew.
"""

import json
import logging
import os
import queue
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

QUEUE_LINES: Final = 10_000
BATCH_LINES: Final = 256
CLOSE_SECONDS: Final = 5.0
STDOUT: Final = "-"

_log = logging.getLogger(__name__)


class JsonLog:
    """A log of JSON objects, one a line.

    Args:
        target: the file, or `-` for stdout.

    Attributes:
        written: lines that reached the file.
        dropped: lines that did not.

    Raises:
        OSError: the file cannot be opened for writing.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.written = 0
        self.dropped = 0
        self._queue: queue.Queue[bytes | None] = queue.Queue(QUEUE_LINES)
        self._file = _LogFile(target)
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="qinfer-log", daemon=True)
        self._thread.start()

    def write(self, entry: dict[str, Any]) -> None:
        """Queue one object, with the time in front; drop it if the queue is full."""
        entry = {"time": datetime.now(UTC).isoformat(timespec="milliseconds")} | entry
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what is queued, for a few seconds at most, and close the file."""
        try:
            self._queue.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            lines: list[bytes] = []
            item = self._queue.get()
            while item is not None:
                lines.append(item)
                if len(lines) == BATCH_LINES or self._queue.empty():
                    break
                item = self._queue.get()
            if lines:
                self._put(lines)
            if item is None:
                self._file.close()
                return

    def _put(self, lines: list[bytes]) -> None:
        """Write lines; those that do not fit are lost and counted."""
        try:
            written = self._file.write(lines)
        except OSError as error:
            written = 0
            self._warn(error)
        else:
            if written == len(lines):
                self._failing = False
            else:
                self._warn(OSError("the disk is full"))
        self.written += written
        self.dropped += len(lines) - written

    def _warn(self, error: OSError) -> None:
        """Warn, once until it works again."""
        if not self._failing:
            self._failing = True
            _log.warning(
                "the log %s cannot be written: %s; its lines are dropped and counted, the service "
                "goes on",
                self.target,
                error,
            )


class _LogFile:
    """An appended file that follows its name, and never leaves a torn line before a new one."""

    def __init__(self, target: str) -> None:
        self._path = None if target == STDOUT else Path(target)
        self._fd = sys.stdout.fileno() if self._path is None else _open(self._path)
        self._torn = self._path is not None and _ends_torn(self._path)

    def write(self, lines: list[bytes]) -> int:
        """Write lines and return how many got in whole.

        Raises:
            OSError: none of them could be written.
        """
        self._follow()
        data = (b"\n" if self._torn else b"") + b"".join(lines)
        written = os.write(self._fd, data)
        if written == len(data):
            self._torn = False
            return len(lines)
        if written == 0:
            return 0
        left = written - (1 if self._torn else 0)
        whole = 0
        while left >= len(lines[whole]):
            left -= len(lines[whole])
            whole += 1
        self._torn = left > 0
        return whole

    def close(self) -> None:
        """Close the file."""
        if self._path is not None:
            os.close(self._fd)

    def _follow(self) -> None:
        """Open the file anew if its name stands for another one, or for none, by now."""
        if self._path is None:
            return
        opened = os.fstat(self._fd)
        try:
            named = self._path.stat()
        except FileNotFoundError:
            named = None
        if named is None or (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino):
            fresh = _open(self._path)
            os.close(self._fd)
            self._fd, self._torn = fresh, _ends_torn(self._path)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)


def _ends_torn(path: Path) -> bool:
    """Tell whether a file ends within a line, as after kill -9 or on a disk that was full."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
