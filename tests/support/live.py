"""A real server on a free loopback port, in a thread of the test's own process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from qinfer.engine.aio import AsyncEngine
from qinfer.engine.llm import LLM
from qinfer.server.app import create_app
from qinfer.server.listen import bind, url_of
from qinfer.server.run import uvicorn_config
from qinfer.server.service import ServerSettings
from qinfer.server.settings import OperationSettings

DEADLINE_SECONDS = 30
TLS_FILES = Path(__file__).parent / "tls"


@dataclass(frozen=True, slots=True)
class Live:
    """A running server.

    Args:
        url: where it listens.
        engine: its engine; `stats()` may be read from any thread.
    """

    url: str
    engine: AsyncEngine

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def wait_until_idle(self) -> None:
        """Wait until no request runs or waits and every cache block is free again."""
        wait_for(self._is_idle)

    def _is_idle(self) -> bool:
        stats = self.engine.stats()
        return stats.running == stats.waiting == 0 and stats.free_blocks == stats.num_blocks


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll until a condition holds.

    Raises:
        TimeoutError: it never did.
    """
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition never came true")
        time.sleep(0.01)


@contextmanager
def live_server(
    model: Path, *, operations: OperationSettings | None = None, **options: Any
) -> Iterator[Live]:
    """Serve a model under the name `m` until the block ends; `options` are those of `LLM`."""
    with bind("127.0.0.1", 0) as sock, LLM(model, threads=1, **options) as llm:
        engine = AsyncEngine(llm.core)
        settings = ServerSettings(
            served_model_names=("m",),
            max_model_len=llm.core.limits.max_model_len,
            operations=operations or OperationSettings(),
        )
        app = create_app(engine, llm.tokenizer, settings)
        server = uvicorn.Server(uvicorn_config(app, None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield Live(url_of(sock), engine)
        finally:
            server.should_exit = True
            thread.join(DEADLINE_SECONDS)
