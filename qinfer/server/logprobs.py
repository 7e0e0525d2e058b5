"""How tokens and their log-probabilities look in answers: three layouts for the same facts."""

import math
from collections.abc import Sequence

from pydantic import BaseModel

from qinfer.engine.request import TokenLogprob
from qinfer.models.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot hold


class CompletionLogprobs(BaseModel):
    """The older layout: parallel lists, one entry per token; null where there was no context."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


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


class PromptLogprob(BaseModel):
    """vLLM's entry for a token of the prompt, or one of the likely ones in its place.

    The rank of a token that is not among the likely ones is not known.
    """

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


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
        top: dict[str, float] = {}
        for token_id, logprob in entry.top:
            name = token_text(tokenizer, token_id)
            top[name if name not in top else f"token_id:{token_id}"] = finite(logprob)
        offset = _append(result, token_text(tokenizer, entry.token_id), offset)
        result.token_logprobs.append(finite(entry.logprob))
        result.top_logprobs.append(top)
    return result


def echo_logprobs(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    num_top: int,
) -> CompletionLogprobs:
    """Return the older layout for a prompt, whose first token has no context to be likely in."""
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    offset = 0
    for token_id, entry in zip(prompt, entries, strict=True):
        if entry is not None:
            one = completion_logprobs(tokenizer, [_cut(entry, num_top)], offset)
            offset = extend(result, one)
        else:
            offset = _append(result, token_text(tokenizer, token_id), offset)
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
    return result


def extend(left: CompletionLogprobs, right: CompletionLogprobs) -> int:
    """Append `right` to `left`; return the characters of text up to the end of `right`."""
    left.tokens += right.tokens
    left.token_logprobs += right.token_logprobs
    left.top_logprobs += right.top_logprobs
    left.text_offset += right.text_offset
    return end_of(left)


def end_of(logprobs: CompletionLogprobs) -> int:
    """Return the characters of text up to the end of the last token."""
    if not logprobs.tokens:
        return 0
    return logprobs.text_offset[-1] + len(logprobs.tokens[-1])


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


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None], num_top: int
) -> PromptLogprobs:
    """Return vLLM's layout: for each token, by id, the likely ones and the prompt's own."""
    result: PromptLogprobs = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        likely = {
            str(token_id): PromptLogprob(
                logprob=finite(logprob),
                rank=rank,
                decoded_token=token_text(tokenizer, token_id),
            )
            for rank, (token_id, logprob) in enumerate(entry.top[:num_top], start=1)
        }
        own = PromptLogprob(
            logprob=finite(entry.logprob),
            rank=None,
            decoded_token=token_text(tokenizer, entry.token_id),
        )
        likely.setdefault(str(entry.token_id), own)
        result.append(likely)
    return result


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


def _append(result: CompletionLogprobs, text: str, offset: int) -> int:
    result.tokens.append(text)
    result.text_offset.append(offset)
    return offset + len(text)


def _cut(entry: TokenLogprob, num_top: int) -> TokenLogprob:
    return TokenLogprob(entry.token_id, entry.logprob, entry.top[:num_top])
