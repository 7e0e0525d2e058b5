"""POST /v1/chat/completions: a conversation continued through the model's chat template."""

from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import Response

from qinfer.engine.request import TokenEvent
from qinfer.errors import QinferError
from qinfer.server.answer import Answer, answer
from qinfer.server.generation import Choice, Job
from qinfer.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatResponse,
    Usage,
    chat_logprobs,
)
from qinfer.server.service import Service
from qinfer.server.wire import ChatRequest


async def chat(body: ChatRequest, request: Request, service: Service) -> Response:
    """Answer one conversation.

    Raises:
        QinferError: the request is invalid, or the engine could not finish it.
    """
    service.check_model(body.model)
    params = body.params()
    prompt = await service.encode_chat(body)
    job = Job(service.new_id("chatcmpl"), [prompt], params)
    return await answer(request, service.engine, job, ChatWriter(Answer(job.id, service)), body)


@dataclass(frozen=True, slots=True)
class ChatWriter:
    """Writes answers and chunks of chats."""

    answer: Answer

    def opening(self, index: int) -> ChatChunk:
        """Return the chunk that announces the role."""
        return self._chunk(
            [ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))]
        )

    def chunk(self, index: int, event: TokenEvent) -> ChatChunk | None:
        """Return the chunk of an event; None if there is nothing to show yet."""
        if not event.text and not event.logprobs and event.finish_reason is None:
            return None
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=event.text or None),
            finish_reason=event.finish_reason,
        )
        if event.logprobs is not None:
            choice.logprobs = chat_logprobs(self.answer.service.tokenizer, event.logprobs)
        return self._chunk([choice])

    def usage(self, usage: Usage) -> ChatChunk:
        """Return the last chunk, which has no choices."""
        return self._chunk([], usage)

    def full(self, choices: list[Choice], usage: Usage) -> ChatResponse:
        """Return the whole answer."""
        return ChatResponse(
            id=self.answer.id,
            created=self.answer.created,
            model=self.answer.service.name,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=usage,
        )

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        if choice.finish_reason is None:
            raise QinferError("an answer without an end")
        return ChatChoice(
            index=index,
            message=ChatMessage(content="".join(choice.text)),
            logprobs=None
            if choice.logprobs is None
            else chat_logprobs(self.answer.service.tokenizer, choice.logprobs),
            finish_reason=choice.finish_reason,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(
            id=self.answer.id,
            created=self.answer.created,
            model=self.answer.service.name,
            choices=choices,
            usage=usage,
        )
