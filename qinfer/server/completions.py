"""POST /v1/completions: text continued, for text or token ids, one prompt or many."""

from dataclasses import dataclass, field

from fastapi import Request
from fastapi.responses import Response

from qinfer.engine.request import TokenEvent
from qinfer.server.answer import Answer, answer
from qinfer.server.generation import Choice, Job
from qinfer.server.responses import (
    CompletionChoice,
    CompletionResponse,
    Usage,
    completion_logprobs,
    token_text,
)
from qinfer.server.service import Service
from qinfer.server.wire import CompletionRequest


async def complete(body: CompletionRequest, request: Request, service: Service) -> Response:
    """Answer one request for completions.

    Raises:
        QinferError: the request is invalid, or the engine could not finish it.
    """
    service.check_model(body.model)
    params = body.params()
    prompts = await service.encode(body.prompts, add_special_tokens=body.add_special_tokens)
    job = Job(service.new_id("cmpl"), prompts, params)
    writer = CompletionWriter(Answer(job.id, service))
    return await answer(request, service.engine, job, writer, body)


@dataclass(frozen=True, slots=True)
class CompletionWriter:
    """Writes answers and chunks of completions.

    Args:
        answer: what all chunks of the answer share.
        offsets: characters of token text before the next token, by choice.
    """

    answer: Answer
    offsets: dict[int, int] = field(default_factory=dict)

    def opening(self, index: int) -> None:  # noqa: ARG002 - the protocol's signature
        """Return nothing: a completion has no role to announce."""
        return

    def chunk(self, index: int, event: TokenEvent) -> CompletionResponse | None:
        """Return the chunk of an event; None if there is nothing to show yet."""
        if not event.text and not event.logprobs and event.finish_reason is None:
            return None
        choice = CompletionChoice(index=index, text=event.text, finish_reason=event.finish_reason)
        if event.logprobs is not None:
            tokenizer = self.answer.service.tokenizer
            offset = self.offsets.get(index, 0)
            choice.logprobs = completion_logprobs(tokenizer, event.logprobs, offset)
            self.offsets[index] = offset + sum(
                len(token_text(tokenizer, entry.token_id)) for entry in event.logprobs
            )
        return self._response([choice], None)

    def usage(self, usage: Usage) -> CompletionResponse:
        """Return the last chunk, which has no choices."""
        return self._response([], usage)

    def full(self, choices: list[Choice], usage: Usage) -> CompletionResponse:
        """Return the whole answer."""
        tokenizer = self.answer.service.tokenizer
        return self._response(
            [
                CompletionChoice(
                    index=index,
                    text="".join(choice.text),
                    logprobs=None
                    if choice.logprobs is None
                    else completion_logprobs(tokenizer, choice.logprobs, 0),
                    finish_reason=choice.finish_reason,
                )
                for index, choice in enumerate(choices)
            ],
            usage,
        )

    def _response(self, choices: list[CompletionChoice], usage: Usage | None) -> CompletionResponse:
        return CompletionResponse(
            id=self.answer.id,
            created=self.answer.created,
            model=self.answer.service.name,
            choices=choices,
            usage=usage,
        )
