"""`qinfer serve` as a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DEADLINE_SECONDS = 60
MAIN = "from qinfer.cli.main import main; main()"

# An engine that takes its time, so that a test can act while a request runs.
SLOW = """
import time
from qinfer.engine.core import EngineCore
step = EngineCore.step
def slow_step(core):
    time.sleep(0.02)
    return step(core)
EngineCore.step = slow_step
"""
# An engine that breaks down with its tenth step.
BREAKING = """
import itertools
from qinfer.engine.core import EngineCore
step, steps = EngineCore.step, itertools.count(1)
def breaking_step(core):
    if next(steps) == 10:
        raise MemoryError("no memory left")
    return step(core)
EngineCore.step = breaking_step
"""


@dataclass(frozen=True, slots=True)
class Served:
    """A running server.

    Args:
        process: it.
        url: where it is reached.
        line: what it said when it was ready.
        before: what it said before that.
    """

    process: "subprocess.Popen[str]"
    url: str
    line: str
    before: str

    def rest(self) -> str:
        """Return what it said since, once it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextmanager
def serving(
    model: Path, *arguments: str, prepare: str = "", environment: dict[str, str] | None = None
) -> Iterator[Served]:
    """Run `qinfer serve` on a free port until the block ends.

    Args:
        model: what it serves.
        arguments: further ones; a later --port wins.
        prepare: Python that runs in it first.
        environment: variables beside the test's own.
    """
    command = [sys.executable, "-c", prepare + MAIN, "serve", str(model), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--threads", "1", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (environment or {}),
    )
    assert process.stderr is not None
    before = ""
    try:
        while True:
            line = process.stderr.readline()
            found = re.search(r"^serving .* at (https?(?:\+unix)?://\S+):", line)
            if found:
                break
            assert line, before  # it ended
            before += line
        yield Served(process, found.group(1), line, before)
    finally:
        process.kill()
        process.wait(DEADLINE_SECONDS)
        process.stderr.close()
