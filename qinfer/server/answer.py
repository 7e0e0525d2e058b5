"""One request answered, streamed or whole: the part that is the same for every endpoint."""

import time
from dataclasses import dataclass, field
from typing import Protocol

from fastapi.responses import Response
from pydantic import BaseModel

from qinfer.server.generation import Choice, Job, best, collect, run
from qinfer.server.json_writing import dumps
from qinfer.server.responses import Usage, total_usage
from qinfer.server.service import Service
from qinfer.server.streaming import EventStream, StreamWriter, encoded


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


class WholeWriter(Protocol):
    """Turns finished choices into one kind of answer."""

    def full(self, choices: list[Choice], usage: Usage) -> BaseModel:
        """Return the whole answer."""


async def answer_whole(service: Service, job: Job, writer: WholeWriter) -> Response:
    """Run a job and return its answer in one piece.

    Raises:
        QinferError: the engine refused the job or could not finish it.
    """
    choices = await collect(run(service.engine, job), job.num_sequences)
    counts = [choice.usage for choice in choices if choice.usage is not None]
    usage = total_usage(counts, job.num_samples)
    shown = best(choices, job)

    # Log-probabilities may be megabytes, and their texts are looked up one by one.
    if any(choice.logprobs or choice.prompt_logprobs for choice in shown):
        text = await service.in_thread(lambda: dumps(writer.full(shown, usage)))
    else:
        text = writer.full(shown, usage).model_dump_json()
    return Response(text, media_type="application/json")


async def answer_streamed(
    service: Service, job: Job, writer: StreamWriter, *, heavy: bool = False
) -> Response:
    """Run a job and return its answer as a stream.

    A stream starts when its first event is there, so that a request which the engine refuses or
    fails at once still gets the right status.

    Args:
        service: the served model.
        job: what is run.
        writer: of the stream.
        heavy: chunks may be so large that they are written off the event loop.

    Raises:
        QinferError: the engine refused the job, or failed at once.
    """
    events = run(service.engine, job)
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(encoded(first, events, writer, service.in_thread if heavy else None), events)
