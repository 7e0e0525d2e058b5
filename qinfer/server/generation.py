"""Running the sequences of one HTTP request: merged events, whole results, gone clients."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from qinfer.engine.aio import AsyncEngine
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import FinishReason, TokenEvent, TokenLogprob, Usage
from qinfer.server.errors import GenerationError, UnavailableError

Result = TypeVar("Result")

# (index of the choice in the answer, what happened to it)
ChoiceEvents = AsyncGenerator[tuple[int, TokenEvent], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request as the engine sees it: each prompt becomes an engine request.

    Args:
        id: the answer's id; the engine's ids are made from it.
        prompts: token ids of each prompt.
        params: of all of them; `n` choices per prompt, numbered prompt by prompt as OpenAI does.
    """

    id: str
    prompts: Sequence[list[int]]
    params: SamplingParams

    @property
    def num_choices(self) -> int:
        """Choices in the answer."""
        return len(self.prompts) * self.params.n


@dataclass(slots=True)
class Choice:
    """What a choice has come to, event by event."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    def add(self, event: TokenEvent) -> None:
        """Take in one event."""
        self.text.append(event.text)
        if event.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(event.logprobs)
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self.usage = event.usage


async def run(engine: AsyncEngine, job: Job) -> ChoiceEvents:
    """Yield the events of all choices as they come; closing the generator aborts what is left.

    Raises:
        RequestError: the engine refuses a prompt or a parameter.
        GenerationError: the engine ended a sequence with an error.
        UnavailableError: the engine does not run, or stops.
    """
    if not engine.healthy:
        raise UnavailableError(f"the engine has failed: {engine.failure or 'it is not running'}")
    events: asyncio.Queue[tuple[int, TokenEvent] | asyncio.Task[None]] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_forward(engine, job, number, events))
        for number in range(len(job.prompts))
    ]
    for task in tasks:
        task.add_done_callback(events.put_nowait)
    unfinished = len(tasks)
    try:
        while unfinished:
            item = await events.get()
            if isinstance(item, asyncio.Task):
                item.result()  # raises what ended the task
                unfinished -= 1
            else:
                _check(item[1])
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect(events: ChoiceEvents, num_choices: int) -> list[Choice]:
    """Return the finished choices.

    Raises:
        GenerationError: one did not finish.
    """
    choices = [Choice() for _ in range(num_choices)]
    async with aclosing(events):
        async for index, event in events:
            choices[index].add(event)
    if any(choice.finish_reason is None for choice in choices):
        raise GenerationError("the engine ended a request without an answer")
    return choices


async def unless_disconnected(request: Request, work: Awaitable[Result]) -> Result:
    """Await `work`, or cancel it as soon as the client is gone (S01).

    Raises:
        ClientDisconnect: the client is gone.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _forward(
    engine: AsyncEngine,
    job: Job,
    number: int,
    queue: "asyncio.Queue[tuple[int, TokenEvent] | asyncio.Task[None]]",
) -> None:
    stream = engine.generate(job.prompts[number], job.params, f"{job.id}-{number}")
    async with aclosing(stream):
        async for event in stream:
            queue.put_nowait((number * job.params.n + event.index, event))


def _check(event: TokenEvent) -> None:
    if event.finish_reason == "error":
        raise GenerationError(event.error or "the engine ended the request with an error")
    if event.finish_reason == "abort":
        raise UnavailableError("the request was cut off: the server is stopping")


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
