"""The child process of `isolation`: measures one row and tells about it, a JSON line at a time.

Standard output carries `{"percent", "note"}`, `{"warning"}` and `{"error", "message"}` and nothing
else: whatever a library prints goes to standard error.
"""

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from qinfer.errors import QinferError
from qinfer.report.jsonio import build, load_json
from qinfer.workflows.row import RowJob, measure

EXIT_REFUSED = 1  # the error was told on standard output


class _Channel(logging.Handler):
    """Writes events, and warnings of qinfer's loggers as events."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.WARNING)
        self._stream = stream

    def send(self, **event: object) -> None:
        self._stream.write(json.dumps(event) + "\n")
        self._stream.flush()

    def emit(self, record: logging.LogRecord) -> None:
        self.send(warning=record.getMessage())


def main(job_file: str, result_file: str) -> int:
    """Measure the row of `job_file`, write the result, and return the exit code."""
    channel = _Channel(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)  # what anybody else prints is no event
    logging.getLogger("qinfer").addHandler(channel)
    job = build(RowJob, load_json(Path(job_file)), where="job")
    try:
        result = measure(
            job, lambda percent, note: channel.send(percent=percent, note=note), own_process=True
        )
    except QinferError as error:
        channel.send(error=type(error).__name__, message=str(error))
        return EXIT_REFUSED
    Path(result_file).write_text(json.dumps(asdict(result), allow_nan=False), encoding="utf-8")
    return 0
