"""From token ids to text, as it becomes certain: UTF-8 across tokens, stop strings, end reasons.

What is emitted never has to be taken back: incomplete UTF-8 waits for its other bytes, and text
that may begin a stop string waits until it cannot. So the pieces, joined, are the whole text, and
a stream equals the answer in one piece. Torch-free.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from qinfer.engine.request import FinishReason, Request


class TokenDecoder(Protocol):
    """What detokenizing needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, which are no text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a token sequence."""
        ...


class TextTokenizer(TokenDecoder, Protocol):
    """What the engine needs of a tokenizer: also the way from text to tokens."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`."""
        ...


class Detokenizer:
    """Turns the tokens of one output into text, piece by piece.

    Args:
        tokenizer: knows the bytes of each token.
        skip_special_tokens: leave control tokens out.
    """

    def __init__(self, tokenizer: TokenDecoder, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True

    def push(self, token_id: int) -> str:
        """Return the text that became certain with `token_id`."""
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            # SentencePiece decoders strip the space that the first piece brings; ask ours.
            if data.startswith(b" ") and not self._tokenizer.decode([token_id]).startswith(" "):
                data = data[1:]
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Return what is left of an incomplete character at the end."""
        return self._utf8.decode(b"", final=True)


class StopMatcher:
    """Holds text back that may begin a stop string, and finds the first that completes.

    Of several matches the one that ends first wins, and of those that end together the longest:
    a rule that does not depend on how the text was cut into tokens.

    Args:
        stops: the stop strings.
        include: a matched stop string stays in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Return the text that became certain, and whether a stop string ended it.

        Args:
            text: what was added.
            may_stop: False: stop strings that complete now are let through.
        """
        if not self._stops:
            return text, False
        held = self._held + text
        if may_stop:
            matches = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
            if matches:
                end, start = min(matches)
                self._held = ""
                return held[: end if self._include else start], True
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """Return the text that was held back; it turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may begin `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class OutputStream:
    """The text of one request as it grows, and the reason why it ends."""

    def __init__(self, request: Request, tokenizer: TokenDecoder) -> None:
        params = request.params
        self._request = request
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop, include=params.include_stop_str_in_output)

    def push(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Return the text that became certain with the request's newest token, and the end.

        The text of a stop token is left out unless stop strings are to be included.
        """
        request, params = self._request, self._request.params
        if token_id in request.stop_ids:
            kept = self._detokenizer.push(token_id) if params.include_stop_str_in_output else ""
            return self._finish(kept), "stop"
        may_stop = request.num_output >= params.min_tokens
        text, stopped = self._matcher.push(self._detokenizer.push(token_id), may_stop=may_stop)
        if stopped:
            return text, "stop"
        if request.num_tokens >= request.max_length:
            return text + self._finish(), "length"
        return text, None

    def _finish(self, text: str = "") -> str:
        """Return everything that is still held back, with `text` at its end."""
        rest, _ = self._matcher.push(text + self._detokenizer.flush(), may_stop=False)
        return rest + self._matcher.flush()
