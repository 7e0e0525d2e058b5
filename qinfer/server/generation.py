"""Running the sequences of one HTTP request: their events, whole results, gone clients."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from qinfer.engine.aio import AsyncEngine
from qinfer.engine.beams import BeamParams
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import FinishReason, TokenEvent, TokenLogprob, Usage
from qinfer.errors import RequestError
from qinfer.server.errors import GenerationError, UnavailableError
from qinfer.server.observer import RequestRecord

Result = TypeVar("Result")

# (index of the choice in the answer, what happened to it); all that came at once
Batch = list[tuple[int, TokenEvent]]
Batches = AsyncGenerator[Batch, None]


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request as the engine sees it: each prompt becomes an engine request.

    Args:
        id: the answer's id; the engine's ids are made from it.
        prompts: token ids of each prompt.
        params: of all of them; sequences are numbered prompt by prompt as OpenAI does.
        record: notes what the request takes.
        num_shown: choices per prompt in the answer, the best of its sequences; None = all.
        only_prompts: what is generated does not belong to the answer.
    """

    id: str
    prompts: Sequence[list[int]]
    params: SamplingParams | BeamParams
    record: RequestRecord
    num_shown: int | None = None
    only_prompts: bool = False

    @property
    def num_samples(self) -> int:
        """Sequences of each prompt."""
        params = self.params
        return params.n if isinstance(params, SamplingParams) else params.num_return_sequences

    @property
    def num_sequences(self) -> int:
        """Sequences of all prompts."""
        return len(self.prompts) * self.num_samples


@dataclass(slots=True)
class Choice:
    """What a sequence has come to, event by event.

    Args:
        prompt_logprobs: of its prompt's tokens, if asked for.
    """

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    def add(self, event: TokenEvent) -> None:
        """Take in one event."""
        self.text.append(event.text)
        if event.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(event.logprobs)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self.usage = event.usage

    @property
    def quality(self) -> float:
        """Mean log-probability of the tokens, by which `best_of` ranks."""
        if not self.logprobs:
            return float("-inf")
        return sum(entry.logprob for entry in self.logprobs) / len(self.logprobs)


async def run(engine: AsyncEngine, job: Job) -> Batches:
    """Yield the events of all choices as they come; closing the generator aborts what is left.

    Raises:
        RequestError: the engine refuses a prompt or a parameter, or what is asked for leaves no
            token to choose.
        GenerationError: the engine ended a sequence with an error.
        UnavailableError: the engine does not run, or stops.
    """
    if not engine.healthy:
        raise UnavailableError(f"the engine has failed: {engine.failure or 'it is not running'}")
    prompts = {f"{job.id}-{number}": prompt for number, prompt in enumerate(job.prompts)}
    job.record.admitted(job.id, sum(map(len, job.prompts)))
    items = engine.stream(prompts, job.params, on_end=job.record.sequence_ended)
    async with aclosing(items):
        async for batch in items:
            good: Batch = []
            for number, event in batch:
                error = _error(event)
                if error is not None:
                    if good:
                        yield good
                    raise error
                shown = _without_output(event) if job.only_prompts else event
                good.append((number * job.num_samples + event.index, shown))
            yield good


async def collect(events: Batches, num_sequences: int) -> list[Choice]:
    """Return the finished sequences.

    Raises:
        GenerationError: one did not finish.
    """
    choices = [Choice() for _ in range(num_sequences)]
    async with aclosing(events):
        async for batch in events:
            for index, event in batch:
                choices[index].add(event)
    if any(choice.finish_reason is None for choice in choices):
        raise GenerationError("the engine ended a request without an answer")
    return choices


def best(choices: list[Choice], job: Job) -> list[Choice]:
    """Return the choices that are shown: of each prompt, the most likely by their mean."""
    n = job.num_samples
    if job.num_shown is None or job.num_shown == n:
        return choices
    groups = [choices[start : start + n] for start in range(0, len(choices), n)]
    ranked = [sorted(group, key=lambda choice: -choice.quality) for group in groups]
    return [choice for group in ranked for choice in group[: job.num_shown]]


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


def _error(event: TokenEvent) -> Exception | None:
    if event.contradictory:
        return RequestError(event.error or "what is asked for contradicts itself")
    if event.finish_reason == "error":
        return GenerationError(event.error or "the engine ended the request with an error")
    if event.finish_reason == "abort":
        return UnavailableError("the request was cut off: the server is stopping")
    return None


def _without_output(event: TokenEvent) -> TokenEvent:
    usage = None if event.usage is None else replace(event.usage, completion_tokens=0)
    logprobs = None if event.logprobs is None else ()
    reason: FinishReason | None = None if event.finish_reason is None else "length"
    return replace(
        event, token_ids=(), text="", logprobs=logprobs, usage=usage, finish_reason=reason
    )


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
