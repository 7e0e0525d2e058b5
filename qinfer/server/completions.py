"""POST /v1/completions: text continued, for text or token ids, one prompt or many."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi.responses import Response

from qinfer.engine.request import TokenEvent, TokenLogprob
from qinfer.server.answer import Answer, answer_streamed, answer_whole
from qinfer.server.bodies.completions import CompletionRequest
from qinfer.server.chunks import ChunkStream
from qinfer.server.generation import Choice, Job
from qinfer.server.logprobs import (
    CompletionLogprobs,
    completion_logprobs,
    echo_logprobs,
    end_of,
    extend,
    prompt_logprobs,
)
from qinfer.server.observer import RequestRecord
from qinfer.server.responses import CompletionChoice, CompletionResponse, Usage, end_reason
from qinfer.server.service import Service

PromptEntries = Sequence[TokenLogprob | None]


async def complete(body: CompletionRequest, service: Service, record: RequestRecord) -> Response:
    """Answer one request for completions.

    Raises:
        QinferError: the request is invalid, or the engine could not finish it.
    """
    service.check_model(body.model)
    params = body.params()
    await service.prepare(params, body.structure_field)
    prompts = await service.encode(body.prompts, add_special_tokens=body.add_special_tokens)
    job = Job(
        service.new_id("cmpl"),
        prompts,
        params,
        record,
        num_shown=body.num_shown,
        only_prompts=body.only_prompt,
    )
    echoes = None
    if body.echo:
        echoes = await service.decode(body.prompts, skip_special_tokens=params.skip_special_tokens)
    writer = CompletionWriter(Answer(job.id, service), body, prompts, echoes)
    if not body.stream:
        return await answer_whole(service, job, writer)
    stream = ChunkStream(
        writer,
        [len(prompt) for prompt in prompts],
        job.num_samples,
        include_usage=body.include_usage,
        continuous=body.continuous_usage,
    )
    heavy = body.echo is True and body.logprobs is not None
    return await answer_streamed(service, job, stream, heavy=heavy)


@dataclass(frozen=True, slots=True)
class CompletionWriter:
    """Writes answers and chunks of completions.

    Args:
        answer: what all chunks of the answer share.
        body: what was asked for.
        prompts: token ids of each prompt.
        echoes: text of each prompt, to go before its choices; None = not asked for.
        offsets: characters of token text before the next token, by choice.
        entries: log-probabilities of each prompt, as far as they came.
    """

    answer: Answer
    body: CompletionRequest
    prompts: list[list[int]]
    echoes: list[str] | None
    offsets: dict[int, int] = field(default_factory=dict)
    entries: dict[int, PromptEntries] = field(default_factory=dict)

    @property
    def copies_text(self) -> bool:
        """Texts are copied as they are."""
        return True

    def opening(self, index: int, event: TokenEvent) -> CompletionResponse | None:
        """Return the chunk with the prompt, if it is to be echoed."""
        if self.echoes is None:
            return None
        number = index // self.body.num_shown
        if event.prompt_logprobs is not None:
            self.entries[number] = event.prompt_logprobs
        choice = CompletionChoice(index=index, text=self.echoes[number])
        choice.logprobs = self._echo_logprobs(number)
        if choice.logprobs is not None:
            self.offsets[index] = end_of(choice.logprobs)
        return self._response([choice], None)

    def chunk(self, index: int, event: TokenEvent) -> CompletionResponse | None:
        """Return the chunk of an event; None if there is nothing to show yet."""
        if not event.text and not event.logprobs and event.finish_reason is None:
            return None
        choice = CompletionChoice(index=index, text=event.text)
        if event.finish_reason is not None:
            choice.finish_reason = end_reason(event.finish_reason)
        if self.body.logprobs is not None and event.logprobs is not None:
            tokenizer = self.answer.service.tokenizer
            offset = self.offsets.get(index, 0)
            choice.logprobs = completion_logprobs(tokenizer, event.logprobs, offset)
            self.offsets[index] = end_of(choice.logprobs) or offset
        return self._response([choice], None)

    def usage(self, usage: Usage) -> CompletionResponse:
        """Return the last chunk, which has no choices."""
        return self._response([], usage)

    def full(self, choices: list[Choice], usage: Usage) -> CompletionResponse:
        """Return the whole answer."""
        for index, choice in enumerate(choices):
            if choice.prompt_logprobs is not None:
                self.entries[index // self.body.num_shown] = choice.prompt_logprobs
        shown = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return self._response(shown, usage)

    def _choice(self, index: int, choice: Choice) -> CompletionChoice:
        number = index // self.body.num_shown
        text = "".join(choice.text)
        shown = CompletionChoice(
            index=index,
            text=text if self.echoes is None else self.echoes[number] + text,
            logprobs=self._logprobs(number, choice),
            finish_reason=end_reason(choice.finish_reason),
        )
        if self.body.prompt_logprobs is not None and number in self.entries:
            shown.prompt_logprobs = prompt_logprobs(
                self.answer.service.tokenizer, self.entries[number], self.body.prompt_logprobs
            )
        return shown

    def _logprobs(self, number: int, choice: Choice) -> CompletionLogprobs | None:
        if self.body.logprobs is None or choice.logprobs is None:
            return None
        tokenizer = self.answer.service.tokenizer
        echoed = self._echo_logprobs(number)
        if echoed is None:
            return completion_logprobs(tokenizer, choice.logprobs, 0)
        extend(echoed, completion_logprobs(tokenizer, choice.logprobs, end_of(echoed)))
        return echoed

    def _echo_logprobs(self, number: int) -> CompletionLogprobs | None:
        entries = self.entries.get(number)
        if self.echoes is None or self.body.logprobs is None or entries is None:
            return None
        tokenizer = self.answer.service.tokenizer
        return echo_logprobs(tokenizer, self.prompts[number], entries, self.body.logprobs)

    def _response(self, choices: list[CompletionChoice], usage: Usage | None) -> CompletionResponse:
        return CompletionResponse(
            id=self.answer.id,
            created=self.answer.created,
            model=self.answer.service.name,
            choices=choices,
            usage=usage,
        )
