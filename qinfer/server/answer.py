"""One request answered, streamed or whole: the part that is the same for every endpoint."""

import time
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from qinfer.engine.aio import AsyncEngine
from qinfer.server.generation import Choice, Job, collect, run, unless_disconnected
from qinfer.server.responses import Usage, total_usage
from qinfer.server.service import Service
from qinfer.server.streaming import ChunkWriter, EventStream, sse_chunks
from qinfer.server.wire import GenerationRequest


@dataclass(frozen=True, slots=True)
class Answer:
    """What all chunks of an answer share.

    Args:
        id: the answer's id.
        service: the served model.
        created: Unix time.
    """

    id: str
    service: Service
    created: int = field(default_factory=lambda: int(time.time()))


class Writer(ChunkWriter, Protocol):
    """Turns choices into one kind of answer, and events into its chunks."""

    def full(self, choices: list[Choice], usage: Usage) -> BaseModel:
        """Return the whole answer."""


async def answer(
    request: Request, engine: AsyncEngine, job: Job, writer: Writer, body: GenerationRequest
) -> Response:
    """Run a job and return its answer.

    A stream starts when its first event is there, so that a request which the engine refuses or
    fails at once still gets the right status. A client that leaves aborts the job either way.

    Raises:
        QinferError: the engine refused the job or could not finish it.
    """
    events = run(engine, job)
    if not body.stream:
        choices = await unless_disconnected(request, collect(events, job.num_choices))
        n = job.params.n
        counts = [choice.usage for choice in choices if choice.usage is not None]
        usage = total_usage(counts[i : i + n] for i in range(0, len(counts), n))
        return JSONResponse(writer.full(choices, usage).model_dump())
    first = await unless_disconnected(request, anext(events))
    chunks = sse_chunks(
        first,
        events,
        writer,
        num_choices_per_prompt=job.params.n,
        include_usage=body.include_usage,
    )
    return EventStream(chunks, events)
