"""An engine's process as the orchestrator sees it: asked, watched, and stopped while others run."""

import json
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
HERE = Path(__file__).parent


class EngineError(Exception):
    """An engine did not do what it was asked for; the message is its reason."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement.

    Args:
        seconds: of the timed part, as the engine's process reports them.
        others: share of the CPUs' time, from question to answer, that other programs took.
    """

    seconds: float
    others: float


class EngineProcess:
    """A script of this folder, run by a Python, that answers the protocol.

    Args:
        python: interpreter of the engine's environment.
        script: file of this folder.
        threads: for the libraries that read `OMP_NUM_THREADS`.
        log: file that takes what the process writes.
        variables: further `NAME=value` for it.
    """

    def __init__(
        self, python: str, script: str, threads: int, log: Path, variables: tuple[str, ...] = ()
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        common = [f"OMP_NUM_THREADS={threads}", "HF_HUB_OFFLINE=1", "TOKENIZERS_PARALLELISM=0"]
        # Answers have a pipe of their own: libraries print as they like, from their import on.
        reader, writer = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ["env", *common, *variables, python, str(HERE / script), str(writer)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                pass_fds=(writer,),
            )
        os.close(writer)
        self._answers = os.fdopen(reader, encoding="utf-8")

    def ask(self, timeout: float = 900, **message: Any) -> Any:
        """Send a message and return the answer; the process is stopped before and after.

        Raises:
            EngineError: it failed, died or did not answer in time.
        """
        stdin = self._process.stdin
        if stdin is None or self._process.poll() is not None:
            raise EngineError(f"the process has ended: {self._last_words()}")
        self._process.send_signal(signal.SIGCONT)
        stdin.write(json.dumps(message) + "\n")
        stdin.flush()
        if not select.select([self._answers], [], [], timeout)[0]:
            self.kill()
            raise EngineError(f"no answer within {timeout:.0f} s")
        line = self._answers.readline()
        if not line:
            status = self._process.wait()
            raise EngineError(f"the process died ({status}): {self._last_words()}")
        self.pause()
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer["ok"]

    def measure(self, work: dict[str, Any], seed: int) -> Sample:
        """Do a work and watch what the rest of the machine does meanwhile."""
        start, busy, own = time.perf_counter(), busy_seconds(), self.cpu_seconds()
        seconds = self.ask(do="run", work=work, seed=seed)
        elapsed = time.perf_counter() - start
        foreign = busy_seconds() - busy - (self.cpu_seconds() - own)
        return Sample(seconds, max(0.0, foreign) / (elapsed * (os.cpu_count() or 1)))

    def idle_load(self, seconds: float = 1.0) -> float:
        """Return how many cores it uses with nothing to do."""
        self._process.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        before = self.cpu_seconds()
        time.sleep(seconds)
        load = (self.cpu_seconds() - before) / seconds
        self.pause()
        return load

    @property
    def is_alive(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None

    def pause(self) -> None:
        """Stop it, so that it cannot take anything from the engine that is measured."""
        self._process.send_signal(signal.SIGSTOP)

    def cpu_seconds(self) -> float:
        """Return the CPU time that it has used, over all its threads."""
        text = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii")
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def peak_rss(self) -> int:
        """Return the largest resident size that it had, in bytes."""
        text = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        (line,) = (line for line in text.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    def _last_words(self) -> str:
        """Return the last line of the log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._answers.close()


def busy_seconds() -> float:
    """Return the CPU time that all programs have used, plus what the host kept back (steal)."""
    first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    user, nice, system, _, _, irq, softirq, steal = map(int, first.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS
