"""HTTP connections with a limit on everything a client can hold on to.

uvicorn's protocol closes connections that idle between requests, but waits for ever for a request
whose head comes a byte at a time, keeps a head of any size, and holds a response for ever that
nobody reads. Each of these costs memory and file descriptors; here each ends.
"""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

REQUEST_SECONDS: Final = 20.0  # from a request's first byte, or the connection, to its head's end
STALL_SECONDS: Final = 60.0  # that a client may leave a response unread
MAX_HEAD_BYTES: Final = 64 * 1024


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a limit on the time and size of a head, and on stalled responses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._in_body = False  # the parser has seen a head and not yet the end of its body
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._start_request_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        _cancel(self._request_timer)
        self._request_timer = None
        _cancel(self._stall_timer)
        self._stall_timer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless it is a head without an end."""
        if self._is_idle and self._request_timer is None:
            self._start_request_timer()
        if not self._in_body:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_body and self._head_bytes > MAX_HEAD_BYTES:
            self._give_up("The request's head is too large.")

    def on_headers_complete(self) -> None:
        """Stop the clock: the head is there; its body has a limit of its own (`BodyLimit`)."""
        _cancel(self._request_timer)
        self._request_timer = None
        self._in_body, self._head_bytes = True, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note the end of a request; one that was refused before its end leaves an idle client."""
        self._in_body = False
        super().on_message_complete()
        if self._is_idle:
            _cancel(self._request_timer)
            self._request_timer = None
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop that clock."""
        _cancel(self._stall_timer)
        self._stall_timer = None
        super().resume_writing()

    @property
    def _is_idle(self) -> bool:
        """Whether the last request has its answer; what comes now is its rest, or the next."""
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is not None and cycle.response_complete

    def _start_request_timer(self) -> None:
        self._request_timer = self.loop.call_later(
            REQUEST_SECONDS, self._give_up, "The request did not come in time."
        )

    def _give_up(self, message: str) -> None:
        """Close the connection; with a reason, unless an answer is on its way."""
        _cancel(self._request_timer)
        self._request_timer = None
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.send_400_response(message)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
