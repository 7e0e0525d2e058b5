"""The orderly end, tick by tick."""

from types import SimpleNamespace

import uvicorn

from qinfer.server import run
from qinfer.server.lifecycle import Lifecycle
from qinfer.server.run import RunSettings


class Engine:
    """What stopping needs to know of an engine."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.healthy = True
        self.aborted = 0

    def abort_all(self) -> None:
        self.aborted += 1


def make(**settings):
    engine = Engine()
    life = Lifecycle(engine)  # type: ignore[arg-type] # a part of an engine
    config = uvicorn.Config(SimpleNamespace(), log_config=None)  # type: ignore[arg-type] # never called
    return run._Server(config, life, RunSettings(**settings), lambda: None), life, engine


def test_s10_without_a_signal_it_goes_on():
    server, life, _ = make()
    assert not server._is_over(1.0)
    life.in_work = 3
    assert not server._is_over(1e9)


def test_s10_it_waits_for_what_runs_and_not_longer():
    server, life, engine = make(drain_seconds=10.0)
    life.in_work, life.draining = 2, True
    assert not server._is_over(100.0)
    assert not server._is_over(109.0)
    life.in_work = 0
    assert server._is_over(109.1)
    assert engine.aborted == 0


def test_s10_what_does_not_end_is_cut_off_once_and_then_left():
    server, life, engine = make(drain_seconds=10.0)
    life.in_work, life.draining = 2, True
    assert not server._is_over(100.0)
    assert not server._is_over(110.0)
    assert engine.aborted == 1
    assert not server._is_over(111.0)
    assert server._is_over(110.0 + run.FLUSH_SECONDS)  # a client that does not even read its error
    assert engine.aborted == 1


def test_s10_a_failed_engine_is_told_once_and_ends_the_server_if_asked():
    told: list[str] = []
    server, life, engine = make(on_failure=told.append)
    engine.failure = "out of memory"
    assert not server._is_over(1.0)
    assert not server._is_over(2.0)
    assert told == ["out of memory"]
    assert (life.state, server.failure) == ("failed", None)

    server, life, engine = make(on_failure=told.append, exit_on_failure=True)
    engine.failure, life.in_work = "out of memory", 1
    assert not server._is_over(1.0)
    life.in_work = 0
    assert server._is_over(1.1)
    assert server.failure == "out of memory"
