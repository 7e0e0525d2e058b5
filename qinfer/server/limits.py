"""The limit on the size of a request body: refused by its header, or as soon as it is passed."""

from dataclasses import dataclass

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qinfer.server.errors import CLIENT_ERROR, error_body


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """ASGI middleware that answers 413 to bodies of more than `max_bytes`.

    A declared length is refused before a byte is read; a chunked body as soon as it passes the
    limit, so that no more than the limit is ever held.
    """

    app: ASGIApp
    max_bytes: int

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

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self.max_bytes:
                raise HTTPException(413, self._message())
            return message

        return counted

    def _message(self) -> str:
        return f"the body is larger than the limit of {self.max_bytes} bytes"


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None
