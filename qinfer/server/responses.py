"""What clients receive: OpenAI's response bodies, and how tokens and log-probabilities look."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, model_serializer

from qinfer.engine.request import FinishReason, TokenLogprob
from qinfer.engine.request import Usage as TokenCounts
from qinfer.models.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot hold


class CachedTokens(BaseModel):
    """How many prompt tokens came from the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts of one HTTP request: a prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(BaseModel):
    """The older layout: parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One text, or what was added to it since the last chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class CompletionResponse(BaseModel):
    """Answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """One likely token."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatLogprob(TopLogprob):
    """A chosen token with the likely ones beside it."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a message's tokens."""

    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(BaseModel):
    """The answer of the model."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One complete answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatResponse(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """What a chunk adds to the message; fields that add nothing are left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer
    def _without_none(self) -> dict[str, str]:
        fields = {"role": self.role, "content": self.content}
        return {name: value for name, value in fields.items() if value is not None}


class ChatChunkChoice(BaseModel):
    """One answer's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


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


def total_usage(per_prompt: Iterable[Sequence[TokenCounts]]) -> Usage:
    """Add up the counts of a request: for each prompt, those of its n sequences."""
    prompt = completion = cached = 0
    for sequences in per_prompt:
        prompt += sequences[0].prompt_tokens
        cached += sequences[0].cached_tokens
        completion += sum(counts.completion_tokens for counts in sequences)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=CachedTokens(cached_tokens=cached),
    )


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], offset: int
) -> CompletionLogprobs:
    """Return the older layout.

    A token that is no valid UTF-8 is spelled `bytes:\\xf0`, as OpenAI does; where two likely
    tokens have the same text, the later one is spelled `token_id:<id>`, so that none is lost.

    Args:
        tokenizer: gives the text of a token.
        entries: one per token.
        offset: characters of text before the first of them.
    """
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for entry in entries:
        text = token_text(tokenizer, entry.token_id)
        top: dict[str, float] = {}
        for token_id, logprob in entry.top:
            name = token_text(tokenizer, token_id)
            top[name if name not in top else f"token_id:{token_id}"] = finite(logprob)
        result.tokens.append(text)
        result.token_logprobs.append(finite(entry.logprob))
        result.top_logprobs.append(top)
        result.text_offset.append(offset)
        offset += len(text)
    return result


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Return the layout of chat completions, with the bytes of every token."""
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=token_text(tokenizer, entry.token_id),
                logprob=finite(entry.logprob),
                bytes=list(tokenizer.token_bytes(entry.token_id)),
                top_logprobs=[
                    TopLogprob(
                        token=token_text(tokenizer, token_id),
                        logprob=finite(logprob),
                        bytes=list(tokenizer.token_bytes(token_id)),
                    )
                    for token_id, logprob in entry.top
                ],
            )
            for entry in entries
        ]
    )


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's own text, or `bytes:\\x..` where its bytes are no valid UTF-8."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
