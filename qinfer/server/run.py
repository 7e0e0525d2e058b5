"""Running the application under uvicorn: signals, the orderly end, and the hasty one.

What ends a server, and how:

    SIGTERM, SIGINT   it drains: new work gets 503, what runs goes on until `drain_seconds` are
                      over and is then ended with an error; exit status 0
    a second signal   it ends at once, whatever runs; exit status 128 + the signal's number
    engine failure    with `exit_on_failure`: status 1, so that a supervisor starts it again;
                      without: it stays, answers 503, and `/health` says why
"""

import gc
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn
from fastapi import FastAPI

from qinfer.errors import QinferError
from qinfer.server.lifecycle import Lifecycle
from qinfer.server.protocol import LimitedProtocol

KEEP_ALIVE_SECONDS = 75  # longer than the usual client pools keep idle connections
DEFAULT_DRAIN_SECONDS = 30.0
FLUSH_SECONDS = 2.0  # for the last errors to reach their clients

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How a server runs and ends.

    Args:
        drain_seconds: that requests may still take after the signal to stop.
        exit_on_failure: end when the engine has failed.
        tls: context of TLS; None = plain HTTP.
        on_failure: called once with the reason when the engine has failed.
        on_forced: called just before a second signal ends the process.
    """

    drain_seconds: float = DEFAULT_DRAIN_SECONDS
    exit_on_failure: bool = False
    tls: ssl.SSLContext | None = None
    on_failure: Callable[[str], None] = lambda _reason: None
    on_forced: Callable[[], None] = lambda: None


def serve(
    app: FastAPI, sock: socket.socket, settings: RunSettings, *, on_ready: Callable[[], None]
) -> None:
    """Serve until told to stop (S10); see the module for what that means.

    Args:
        app: the application, from `create_app`.
        sock: bound.
        settings: how it ends.
        on_ready: called when requests are answered.

    Raises:
        QinferError: it never got as far as answering, or the engine failed and was to end it.
    """
    config = uvicorn_config(app, settings.tls)
    server = _Server(config, app.state.lifecycle, settings, on_ready)
    # What is loaded by now stays: a full collection that looks at all of it again would hold up
    # every stream for a tenth of a second and more.
    gc.collect()
    gc.freeze()
    try:
        server.run(sockets=[sock])
    except OSError as error:
        raise QinferError(f"the server could not start: {error}") from error
    if not server.started:
        raise QinferError("the server could not start; the log says why")
    if server.failure is not None:
        raise QinferError(f"stopped, since the engine has failed: {server.failure}")


def uvicorn_config(app: FastAPI, tls: ssl.SSLContext | None) -> uvicorn.Config:
    """Return how uvicorn is to treat connections; it knows nothing of signals and ends."""
    return uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(FLUSH_SECONDS),
        ssl_context_factory=None if tls is None else lambda _config, _default: tls,
    )


class _Server(uvicorn.Server):
    """A server that drains before it stops, and that a second signal ends at once."""

    def __init__(
        self,
        config: uvicorn.Config,
        lifecycle: Lifecycle,
        settings: RunSettings,
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self.failure: str | None = None  # for which it stopped
        self._told_failure = False
        self._lifecycle = lifecycle
        self._settings = settings
        self._on_ready = on_ready
        self._deadline: float | None = None
        self._cut = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then tell."""
        await super().startup(sockets)
        if not self.should_exit:
            self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Tell whether to exit; called ten times a second."""
        return await super().on_tick(counter) or self._is_over(time.monotonic())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Begin to drain at the first signal, end at the second.

        uvicorn's own method also notes the signal, to raise it again at the end; but a stop that
        was asked for and went well ends with status 0.
        """
        if self._lifecycle.draining:
            self._settings.on_forced()
            os._exit(128 + sig)  # the engine's threads may be at work; nothing waits for them
        self._lifecycle.draining = True
        if not self.started:
            self.should_exit = True

    def _is_over(self, now: float) -> bool:
        """Drain: wait for what runs, then cut it off, then give up waiting."""
        life = self._lifecycle
        self._look_for_failure()
        if not life.draining:
            return False
        if self._deadline is None:
            patience = FLUSH_SECONDS if self.failure else self._settings.drain_seconds
            self._deadline = now + patience
        if life.in_work == 0:
            return True
        if now < self._deadline:
            return False
        if self._cut:
            return True
        _log.warning("%d requests did not end in time and are cut off", life.in_work)
        self._cut, self._deadline = True, now + FLUSH_SECONDS
        life.engine.abort_all()
        return False

    def _look_for_failure(self) -> None:
        """Tell of a failed engine once, and begin to stop if that is wanted."""
        failure = self._lifecycle.engine.failure
        if failure is None:
            return
        if not self._told_failure:
            self._told_failure = True
            self._settings.on_failure(failure)
        if self._settings.exit_on_failure:
            self.failure, self._lifecycle.draining = failure, True
