"""The limits on a request body: its size, by its header or as soon as it passes, and its time."""

import asyncio
from dataclasses import dataclass
from typing import Final

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qinfer.server.errors import CLIENT_ERROR, error_body

BODY_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """ASGI middleware that answers 413 to large bodies, and 408 to those that take too long.

    A declared length is refused before a byte is read; a chunked body as soon as it passes the
    limit, so that no more than the limit is ever held.

    Args:
        app: gets the bodies that pass.
        max_bytes: of a body.
        max_seconds: from the head of a request to the end of its body.
    """

    app: ASGIApp
    max_bytes: int
    max_seconds: float = BODY_SECONDS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = _content_length(scope)
        if declared is not None and declared > self.max_bytes:
            body = error_body(self._message(), kind=CLIENT_ERROR, code="body_too_large")
            await JSONResponse(body, status_code=413)(scope, receive, send)
            return
        await self.app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        total = 0
        deadline: float | None = asyncio.get_running_loop().time() + self.max_seconds

        async def counted() -> Message:
            nonlocal total, deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                # The rest may still come, so the connection is of no more use.
                raise HTTPException(408, self._late(), {"Connection": "close"}) from None
            if not message.get("more_body", False):
                deadline = None  # what comes from now on is the news that the client is gone
            total += len(message.get("body", b""))
            if total > self.max_bytes:
                raise HTTPException(413, self._message())
            return message

        return counted

    def _late(self) -> str:
        return f"the body did not come within {self.max_seconds:g} seconds"

    def _message(self) -> str:
        return f"the body is larger than the limit of {self.max_bytes} bytes"


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None
