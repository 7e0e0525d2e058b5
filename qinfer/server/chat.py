"""POST /v1/chat/completions: a conversation continued through the model's chat template."""

from dataclasses import dataclass, field

from fastapi.responses import Response

from qinfer.engine.request import TokenEvent
from qinfer.server.answer import Answer, answer_streamed, answer_whole
from qinfer.server.bodies.chat import ChatRequest
from qinfer.server.chunks import ChunkStream
from qinfer.server.generation import Choice, Job
from qinfer.server.logprobs import chat_logprobs, prompt_logprobs
from qinfer.server.observer import RequestRecord
from qinfer.server.responses import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatResponse,
    EndReason,
    FunctionDelta,
    ToolCallAnswer,
    ToolCallDelta,
    Usage,
    end_reason,
)
from qinfer.server.service import Service
from qinfer.server.tool_calls import Called, CallParser, Piece, Said
from qinfer.server.tool_choice import ToolUse, tool_use


async def chat(body: ChatRequest, service: Service, record: RequestRecord) -> Response:
    """Answer one conversation.

    Raises:
        QinferError: the request is invalid, or the engine could not finish it.
    """
    service.check_model(body.model)
    tools = tool_use(body, service.family, template_shows_tools=service.template_shows_tools)
    params = tools.apply(body.params())
    await service.prepare(params, "tools" if tools.structured else body.structure_field)
    prompt = await service.encode_chat(body, tools=tools.rendered)
    job = Job(service.new_id("chatcmpl"), [prompt], params, record)
    writer = ChatWriter(Answer(job.id, service), body, tools)
    if not body.stream:
        return await answer_whole(service, job, writer)
    stream = ChunkStream(
        writer,
        [len(prompt)],
        job.num_samples,
        include_usage=body.include_usage,
        continuous=body.continuous_usage,
    )
    return await answer_streamed(service, job, stream)


@dataclass(slots=True)
class _Reader:
    """Reads the calls in one choice's text.

    Args:
        parser: finds them.
        called: there was one.
    """

    parser: CallParser
    called: bool = False

    def read(self, text: str, *, last: bool) -> list[Piece]:
        pieces = self.parser.push(text)
        if last:
            pieces = pieces + self.parser.finish()
        self.called = self.called or any(isinstance(piece, Called) for piece in pieces)
        return pieces


@dataclass(frozen=True, slots=True)
class ChatWriter:
    """Writes answers and chunks of chats.

    Args:
        answer: what all chunks of the answer share.
        body: what was asked for.
        tools: how calls are read.
        readers: of each choice's text.
    """

    answer: Answer
    body: ChatRequest
    tools: ToolUse
    readers: dict[int, _Reader] = field(default_factory=dict)

    @property
    def copies_text(self) -> bool:
        """Texts are copied as they are, unless calls of tools may stand in them."""
        return self.tools.parser is None

    def opening(self, index: int, event: TokenEvent) -> ChatChunk:  # noqa: ARG002 - the protocol's signature
        """Return the chunk that announces the role."""
        return self._chunk(
            [ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))]
        )

    def chunk(self, index: int, event: TokenEvent) -> ChatChunk | None:
        """Return the chunk of an event; None if there is nothing to show yet."""
        ended = event.finish_reason is not None
        delta = self._delta(index, event.text, last=ended)
        if delta.content is None and not delta.tool_calls and not event.logprobs and not ended:
            return None
        choice = ChatChunkChoice(index=index, delta=delta)
        if ended:
            choice.finish_reason = self._end_reason(index, event)
        if self.body.logprobs and event.logprobs is not None:
            choice.logprobs = chat_logprobs(self.answer.service.tokenizer, event.logprobs)
        return self._chunk([choice])

    def usage(self, usage: Usage) -> ChatChunk:
        """Return the last chunk, which has no choices."""
        return self._chunk([], usage)

    def full(self, choices: list[Choice], usage: Usage) -> ChatResponse:
        """Return the whole answer."""
        answer = ChatResponse(
            id=self.answer.id,
            created=self.answer.created,
            model=self.answer.service.name,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=usage,
        )
        entries = next((c.prompt_logprobs for c in choices if c.prompt_logprobs is not None), None)
        if self.body.prompt_logprobs is not None and entries is not None:
            answer.prompt_logprobs = prompt_logprobs(
                self.answer.service.tokenizer, entries, self.body.prompt_logprobs
            )
        return answer

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        delta = self._delta(index, "".join(choice.text), last=True)
        calls = [
            ToolCallAnswer(
                id=call.id or "",
                function=CalledFunction(
                    name=call.function.name or "", arguments=call.function.arguments
                ),
            )
            for call in delta.tool_calls or ()
        ]
        shown = ChatChoice(
            index=index,
            message=ChatMessage(
                content=delta.content or (None if calls else ""), tool_calls=calls or None
            ),
            finish_reason=self._end_reason(index, choice),
        )
        if self.body.logprobs and choice.logprobs is not None:
            shown.logprobs = chat_logprobs(self.answer.service.tokenizer, choice.logprobs)
        return shown

    def _delta(self, index: int, text: str, *, last: bool) -> ChatDelta:
        """Return what a text adds to a message: more of its content, and calls."""
        if self.tools.parser is None:
            return ChatDelta(content=text or None)
        if index not in self.readers:
            self.readers[index] = _Reader(self.tools.parser())
        pieces = self.readers[index].read(text, last=last)
        said = "".join(piece.text for piece in pieces if isinstance(piece, Said))
        calls: dict[int, ToolCallDelta] = {}
        for piece in pieces:
            if isinstance(piece, Called):
                self._add_call(calls, piece)
        return ChatDelta(content=said or None, tool_calls=list(calls.values()) or None)

    def _add_call(self, calls: dict[int, ToolCallDelta], piece: Called) -> None:
        call = calls.setdefault(
            piece.index, ToolCallDelta(index=piece.index, function=FunctionDelta())
        )
        call.function.arguments += piece.arguments
        if piece.name is not None:
            call.id, call.type = self.tools.new_id(), "function"
            call.function.name = piece.name

    def _end_reason(self, index: int, ended: TokenEvent | Choice) -> EndReason:
        reader = self.readers.get(index)
        called = reader is not None and reader.called and not self.tools.forced
        return end_reason(ended.finish_reason, called=called)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(
            id=self.answer.id,
            created=self.answer.created,
            model=self.answer.service.name,
            choices=choices,
            usage=usage,
        )
