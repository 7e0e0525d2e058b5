"""Server-sent events: a stream's encoding, its errors, its end."""

import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from qinfer.engine.request import TokenEvent
from qinfer.errors import QinferError
from qinfer.server.errors import body_of
from qinfer.server.generation import Batch, Batches

logger = logging.getLogger(__name__)

InThread = Callable[[Callable[[], bytes]], Awaitable[bytes]]


class StreamWriter(Protocol):
    """Turns events into the bytes of one kind of stream."""

    def begin(self) -> bytes:
        """Return what goes before everything else."""

    def event(self, index: int, event: TokenEvent) -> bytes:
        """Return what an event of choice `index` adds."""

    def end(self) -> bytes:
        """Return what goes after the last event."""

    def error(self, error: Exception) -> bytes:
        """Return what ends a stream that cannot go on."""


class EventStream(StreamingResponse):
    """A response that closes the engine's events however it ends, and so aborts them (S01)."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncGenerator[bytes, None], events: Batches) -> None:
        # Proxies must not hold chunks back (X-Accel-Buffering is nginx's name for that).
        super().__init__(content, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._content = content
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._content.aclose()
            await self._events.aclose()


async def encoded(
    first: Batch,
    events: Batches,
    writer: StreamWriter,
    in_thread: InThread | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of an answer whose first events have already come.

    An error in mid-stream is told in the stream; the status is long sent. What comes at once is
    sent at once, so that a busy server has less to do per token.

    Args:
        first: the first events.
        events: all others.
        writer: turns them into bytes.
        in_thread: how that is done off the event loop; None = it is a matter of microseconds.
    """
    try:
        async with aclosing(events):
            begun = writer.begin()
            yield begun + (await _written(first, writer, in_thread))
            async for batch in events:
                data = await _written(batch, writer, in_thread)
                if data:
                    yield data
        yield writer.end()
    except QinferError as error:
        yield writer.error(error)
    except Exception as error:  # the edge of the process: a stream has no other way to tell
        logger.exception("a stream failed")
        yield writer.error(error)


def sse(data: str, event: str | None = None) -> bytes:
    """Return one server-sent event."""
    return (f"data: {data}\n\n" if event is None else f"event: {event}\ndata: {data}\n\n").encode()


def sse_error(error: Exception) -> bytes:
    """Return the event with OpenAI's error object."""
    return sse(json.dumps(body_of(error)))


async def _written(
    batch: Batch,
    writer: StreamWriter,
    in_thread: InThread | None,
) -> bytes:
    def write() -> bytes:
        return b"".join(writer.event(index, event) for index, event in batch)

    return write() if in_thread is None else await in_thread(write)
