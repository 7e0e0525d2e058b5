"""What clients receive: OpenAI's response bodies. Fields beside OpenAI's are absent when unused."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from qinfer.engine.request import FinishReason
from qinfer.engine.request import Usage as TokenCounts
from qinfer.errors import QinferError
from qinfer.server.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs

# Only what ended in order is answered, so there is neither `abort` nor `error`.
EndReason = Literal["stop", "length", "tool_calls"]


def _is_none(value: Any) -> bool:
    return value is None


class CachedTokens(BaseModel):
    """How many prompt tokens came from the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts of one HTTP request: a prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None


class CompletionChoice(BaseModel):
    """One text, or what was added to it since the last chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: EndReason | None = None
    prompt_logprobs: PromptLogprobs | None = Field(default=None, exclude_if=_is_none)


class CompletionResponse(BaseModel):
    """Answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class CalledFunction(BaseModel):
    """The function of a call; `arguments` is JSON text, which the model may have got wrong."""

    name: str
    arguments: str


class ToolCallAnswer(BaseModel):
    """A call that the model makes."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """The answer of the model."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCallAnswer] | None = Field(default=None, exclude_if=_is_none)


class ChatChoice(BaseModel):
    """One complete answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: EndReason


class ChatResponse(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = Field(default=None, exclude_if=_is_none)


class FunctionDelta(BaseModel):
    """What a chunk adds to a call."""

    name: str | None = Field(default=None, exclude_if=_is_none)
    arguments: str = ""


class ToolCallDelta(BaseModel):
    """What a chunk adds to call `index`; id, type and name come with its first."""

    index: int
    id: str | None = Field(default=None, exclude_if=_is_none)
    type: Literal["function"] | None = Field(default=None, exclude_if=_is_none)
    function: FunctionDelta


class ChatDelta(BaseModel):
    """What a chunk adds to the message; fields that add nothing are left out."""

    role: Literal["assistant"] | None = Field(default=None, exclude_if=_is_none)
    content: str | None = Field(default=None, exclude_if=_is_none)
    tool_calls: list[ToolCallDelta] | None = Field(default=None, exclude_if=_is_none)


class ChatChunkChoice(BaseModel):
    """One answer's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: EndReason | None = None


class ChatChunk(BaseModel):
    """One chunk of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """One served name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "qinfer"
    max_model_len: int


class ModelList(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """Answer of /health: `ok` with status 200, `failed` with 503."""

    status: Literal["ok", "failed"]
    reason: str | None = None


class TokenizeResponse(BaseModel):
    """Answer of /tokenize; the texts of the tokens only if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """Answer of /detokenize."""

    prompt: str


def total_usage(counts: Sequence[TokenCounts], num_samples: int = 1) -> Usage:
    """Add up the counts of a request's sequences.

    Args:
        counts: prompt by prompt.
        num_samples: sequences of each prompt, which itself counts once.
    """
    firsts = counts[::num_samples]
    prompt = sum(first.prompt_tokens for first in firsts)
    cached = sum(first.cached_tokens for first in firsts)
    completion = sum(each.completion_tokens for each in counts)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=CachedTokens(cached_tokens=cached),
    )


def end_reason(reason: FinishReason | None, *, called: bool = False) -> EndReason:
    """Return why an answer ended, as OpenAI says it.

    Args:
        reason: the engine's.
        called: the text that ended by itself was a call of a tool.

    Raises:
        QinferError: it did not end, or not in order.
    """
    if reason == "stop":
        return "tool_calls" if called else "stop"
    if reason == "length":
        return "length"
    raise QinferError("an answer without an end")
