"""From ready to gone: what state the server is in, and which requests it still takes.

    loading -> ready -> draining -> (gone)
                  \\-> failed

While it drains it answers what it has begun, refuses new work with 503 and `Connection: close`,
and keeps answering the operator's routes, so that a load balancer sees why.
"""

import time
from dataclasses import dataclass, field
from typing import Final, Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from qinfer.engine.aio import AsyncEngine
from qinfer.errors import OverloadedError
from qinfer.server.errors import UnavailableError, error_response
from qinfer.server.page import ASSET_PREFIX

State = Literal["loading", "ready", "draining", "failed"]

# Routes that cost nothing and that somebody watches while the server is full, stopping or broken.
OPERATOR_PATHS: Final = frozenset(
    {"/health", "/ready", "/version", "/metrics", "/v1/qinfer/stats", "/"}
)
DRAINING: Final = "the server is stopping; it finishes what it has begun and takes no more"


@dataclass(slots=True)
class Lifecycle:
    """The server's state.

    Args:
        engine: whose health decides.
        in_work: requests for work that are being answered now.
        draining: the server has been told to stop.
        born: monotonic seconds.
    """

    engine: AsyncEngine
    in_work: int = 0
    draining: bool = False
    born: float = field(default_factory=time.monotonic)

    @property
    def state(self) -> State:
        """Where the server is in its life."""
        if self.engine.failure is not None:
            return "failed"
        if self.draining:
            return "draining"
        return "ready" if self.engine.healthy else "loading"

    @property
    def reason(self) -> str | None:
        """Why it is not ready; None if it is."""
        if self.state == "failed":
            return f"the engine has failed: {self.engine.failure}"
        if self.state == "draining":
            return DRAINING
        return None if self.state == "ready" else "the engine is not running"

    def rate(self) -> float:
        """Return the tokens generated per second of late."""
        return self.engine.latencies.generated.per_second(time.monotonic())


@dataclass(frozen=True, slots=True)
class Gate:
    """ASGI middleware that takes no more work than the server can answer.

    Args:
        app: what is guarded.
        lifecycle: says whether new work is taken, and counts it.
        max_requests: requests for work that are answered at once.
    """

    app: ASGIApp
    lifecycle: Lifecycle
    max_requests: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it before its body is read."""
        if scope["type"] != "http" or _is_free(scope["path"]):
            await self.app(scope, receive, send)
            return
        life = self.lifecycle
        refusal = self._refusal()
        if refusal is not None:
            response = error_response(refusal)
            if life.draining:
                response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        life.in_work += 1
        try:
            await self.app(scope, receive, send)
        finally:
            life.in_work -= 1

    def _refusal(self) -> Exception | None:
        life = self.lifecycle
        if life.draining:
            return UnavailableError(DRAINING)
        if life.in_work >= self.max_requests:
            return OverloadedError(
                f"{life.in_work} requests are being answered and the limit is "
                f"{self.max_requests}; try again later",
                retry_after=life.engine.retry_after(),
            )
        return None


def _is_free(path: str) -> bool:
    return path in OPERATOR_PATHS or path.startswith(ASSET_PREFIX)
