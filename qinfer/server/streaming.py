"""Server-sent events: chunks of an answer, the final usage, `[DONE]`."""

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from qinfer.engine.request import TokenEvent
from qinfer.engine.request import Usage as TokenCounts
from qinfer.errors import QinferError
from qinfer.server.errors import body_of
from qinfer.server.generation import ChoiceEvents
from qinfer.server.responses import Usage, total_usage

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class ChunkWriter(Protocol):
    """Turns events into one kind of chunk."""

    def opening(self, index: int) -> BaseModel | None:
        """Return what goes before a choice's first event, if anything."""

    def chunk(self, index: int, event: TokenEvent) -> BaseModel | None:
        """Return the chunk of an event; None if there is nothing to show yet."""

    def usage(self, usage: Usage) -> BaseModel:
        """Return the last chunk, which has no choices."""


class EventStream(StreamingResponse):
    """A response that closes the engine's events however it ends, and so aborts them (S01)."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncGenerator[bytes, None], events: ChoiceEvents) -> None:
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


async def sse_chunks(
    first: tuple[int, TokenEvent],
    events: ChoiceEvents,
    writer: ChunkWriter,
    *,
    num_choices_per_prompt: int,
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Yield the encoded events of an answer whose first event has already come.

    An error in mid-stream is an event with OpenAI's error object; the status is long sent.
    """
    hidden = None if include_usage else {"usage"}  # S06: absent unless asked for, else null
    counts: dict[int, TokenCounts] = {}
    seen: set[int] = set()
    try:
        async with aclosing(_chain(first, events)) as chained:
            async for index, event in chained:
                if index not in seen:
                    seen.add(index)
                    opening = writer.opening(index)
                    if opening is not None:
                        yield encode(opening, hidden)
                if event.usage is not None:
                    counts[index] = event.usage
                chunk = writer.chunk(index, event)
                if chunk is not None:
                    yield encode(chunk, hidden)
        if include_usage:
            ordered = [counts[index] for index in sorted(counts)]
            n = num_choices_per_prompt
            groups = [ordered[i : i + n] for i in range(0, len(ordered), n)]
            yield encode(writer.usage(total_usage(groups)), None)
    except QinferError as error:
        yield encode_error(error)
    except Exception as error:  # the edge of the process: a stream has no other way to tell
        logger.exception("a stream failed")
        yield encode_error(error)
    yield DONE


def encode(chunk: BaseModel, hidden: set[str] | None) -> bytes:
    """Return one server-sent event."""
    return f"data: {chunk.model_dump_json(exclude=hidden)}\n\n".encode()


def encode_error(error: Exception) -> bytes:
    """Return the event that ends a stream after an error."""
    return f"data: {json.dumps(body_of(error))}\n\n".encode()


async def _chain(first: tuple[int, TokenEvent], rest: ChoiceEvents) -> ChoiceEvents:
    async with aclosing(rest):
        yield first
        async for item in rest:
            yield item
