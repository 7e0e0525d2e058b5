"""Guesses at a request's next tokens: looked up in its own text. Torch-free.

A drafter may guess whatever it likes: a wrong guess costs time and never changes a token (see
`engine.speculation`). `engine.draft_model` has the other drafter, a smaller model.
"""

from array import array
from collections.abc import Sequence
from typing import Protocol

from qinfer.engine.request import Request

MAX_NGRAM = 4
MIN_NGRAM = 2

_ITEM_BYTES = array("i").itemsize


class Drafter(Protocol):
    """Whatever proposes continuations."""

    def prepare(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Catch up with requests and return those that can be drafted for now."""
        ...

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        """Return for each request at most so many tokens that may come next, perhaps none."""
        ...

    def forget(self, request_id: str) -> None:
        """Let go of a request that has ended."""
        ...


class NgramDrafter:
    """Prompt lookup: what followed when the text last ended like this, in prompt or output.

    The longest ending wins, of equal ones the latest. A continuation that runs into the end of the
    text goes on with itself, so a repetition is drafted at full length.

    Args:
        max_ngram: tokens of the longest ending that is looked for.
        min_ngram: tokens of the shortest.
    """

    def __init__(self, *, max_ngram: int = MAX_NGRAM, min_ngram: int = MIN_NGRAM) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._texts: dict[str, bytearray] = {}

    def prepare(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return the requests: there is nothing to catch up with."""
        return requests

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        """Return what followed the latest earlier occurrence of each request's ending."""
        return [
            self._lookup(request.tokens, self._text(request), length) if length else []
            for request, length in zip(requests, lengths, strict=True)
        ]

    def forget(self, request_id: str) -> None:
        """Let go of a request that has ended."""
        self._texts.pop(request_id, None)

    def _text(self, request: Request) -> bytearray:
        """Return a request's tokens as bytes; only the new ones are added."""
        text = self._texts.setdefault(request.id, bytearray())
        text += array("i", request.tokens[len(text) // _ITEM_BYTES :]).tobytes()
        return text

    def _lookup(self, tokens: Sequence[int], text: bytearray, length: int) -> list[int]:
        for size in self._sizes:
            start = _find_last(text, size)
            if start is not None:
                return _copy(tokens, start + size, length)
        return []


def _find_last(text: bytearray, size: int) -> int | None:
    """Return where the last `size` tokens of a text occurred before, the latest such place."""
    ending = bytes(text[-size * _ITEM_BYTES :])
    stop = len(text) - _ITEM_BYTES  # it must end before the text does
    while len(ending) <= stop:
        at = text.rfind(ending, 0, stop)
        if at < 0:
            return None
        if at % _ITEM_BYTES == 0:
            return at // _ITEM_BYTES
        stop = at + len(ending) - 1  # across token borders: no occurrence
    return None


def _copy(tokens: Sequence[int], start: int, length: int) -> list[int]:
    """Return `length` tokens from `start` on; those beyond the end are copies of the copies."""
    period = len(tokens) - start
    return [tokens[start + offset % period] for offset in range(length)]
