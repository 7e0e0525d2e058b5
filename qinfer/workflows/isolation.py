"""Running a row in a process of its own, so that its peak memory is its own.

A plain child process and JSON files rather than `multiprocessing`: that would run the caller's
main module again, and fails in notebooks and unguarded scripts.
"""

import json
import logging
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import IO

from qinfer import errors
from qinfer.report.jsonio import build, load_json
from qinfer.workflows.row import OnPercent, RowJob, RowResult

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[2]
# -P keeps the working directory out of the path; qinfer's own place comes last, for a checkout
# that the parent found in a way of its own.
_CODE = "import sys; sys.path.append(sys.argv[1]); from qinfer.workflows.worker import main; "
_COMMAND = (sys.executable, "-P", "-c", _CODE + "sys.exit(main(*sys.argv[2:]))", str(_ROOT))
_TAIL_CHARS = 2000


class RowRunner:
    """Runs row after row; a warning that several rows give is logged once.

    Args:
        folder: where job and result files may lie; whoever made it removes it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._warned: set[str] = set()

    def run(self, job: RowJob, on_percent: OnPercent) -> RowResult:
        """Measure a row in a child process.

        Raises:
            QinferError: what the child raised; or it died, with the end of what it printed.
        """
        job_file, result_file = self._folder / "job.json", self._folder / "result.json"
        job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
        with tempfile.TemporaryFile(dir=self._folder) as printed:
            with subprocess.Popen(
                [*_COMMAND, str(job_file), str(result_file)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
                encoding="utf-8",
            ) as process:
                try:
                    self._listen(process.stdout, on_percent)
                    code = process.wait()
                finally:
                    process.kill()  # does nothing to a process that has ended
            if code:
                raise errors.QinferError(_obituary(job, code, printed))
        return build(RowResult, load_json(result_file), where="result")

    def _listen(self, stream: IO[str] | None, on_percent: OnPercent) -> None:
        for line in stream or ():
            event = json.loads(line)
            if "percent" in event:
                on_percent(event["percent"], event["note"])
            elif "warning" in event:
                self._warn(event["warning"])
            else:
                raise _error(event["error"], event["message"])

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message)


def _error(name: str, message: str) -> errors.QinferError:
    """Return the child's error as its own class, so that the exit code survives."""
    kind = vars(errors).get(name)
    if isinstance(kind, type) and issubclass(kind, errors.QinferError):
        return kind(message)
    return errors.QinferError(message)


def _obituary(job: RowJob, code: int, printed: IO[bytes]) -> str:
    printed.seek(0)
    tail = printed.read().decode("utf-8", errors="replace").strip()[-_TAIL_CHARS:]
    if code < 0:
        reason = f"was ended by signal {-code}"
        reason += " (SIGKILL: often because memory ran out)" if code == -9 else ""
    else:
        reason = f"ended with exit code {code}"
    return f"the process that measured {job.model} {reason}" + (f":\n{tail}" if tail else "")
