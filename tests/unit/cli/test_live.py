"""One request at the terminal: Ctrl-C ends it between two steps and leaves nothing behind."""

import signal
from typing import Any

import pytest

from qinfer.cli.live import stream
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import TokenEvent
from qinfer.errors import NonFiniteError


class FakeCore:
    """Yields a token per step; does `at_step[number]` before."""

    def __init__(self, at_step):
        self.at_step = at_step
        self.steps = 0
        self.aborted: list[str] = []

    def add_request(self, request_id, prompt, params):
        assert prompt == [1, 2]

    def step(self):
        self.steps += 1
        reason = self.at_step.get(self.steps, lambda: None)()
        return [TokenEvent("terminal", (65,), "A", finish_reason=reason, error="not finite")]

    def abort(self, request_id):
        self.aborted.append(request_id)


def run(core: Any):
    return "".join(event.text for event in stream(core, [1, 2], SamplingParams()))


def test_until_the_end():
    core = FakeCore({3: lambda: "stop"})
    assert run(core) == "AAA"


def test_ctrl_c_ends_the_request_and_gives_the_signal_back():
    before = signal.getsignal(signal.SIGINT)
    core = FakeCore({2: lambda: signal.raise_signal(signal.SIGINT)})
    assert run(core) == "AA"  # the step in which it came was finished
    assert core.aborted == ["terminal"]
    assert signal.getsignal(signal.SIGINT) is before


def test_g06_an_error_is_raised_not_printed():
    core = FakeCore({2: lambda: "error"})
    with pytest.raises(NonFiniteError, match="not finite"):
        run(core)
    assert core.aborted == ["terminal"]
