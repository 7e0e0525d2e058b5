"""`X-Request-Id`: taken over from the client, or made, and part of every answer."""

import re
import uuid
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER: Final = "X-Request-Id"
# What is safe in a header and in a line of a log; longer ones are replaced, not cut.
_ACCEPTED: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id(scope: Scope) -> str | None:
    """Return the id of the request that a scope belongs to."""
    found = scope.get("state", {}).get("request_id")
    return found if isinstance(found, str) else None


@dataclass(frozen=True, slots=True)
class RequestIds:
    """ASGI middleware that gives every request an id and every answer its header.

    The id is in the scope's state as `request_id`, for logs and error handlers.
    """

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        used = given if _ACCEPTED.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = used

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = used
            await send(message)

        await self.app(scope, receive, named)
