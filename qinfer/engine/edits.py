"""What a request changes in its row of logits before a token is chosen: biases, bans, penalties.

The order is vLLM's: logit_bias, forbidden tokens, then the penalties. Only the logits of tokens
that are named are touched, so a step costs what the request's history holds, not its vocabulary.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from qinfer.engine.params import SamplingParams
from qinfer.engine.request import Request
from qinfer.kernels.sampling import Edits

_FIRST_CAPACITY = 256


class History:
    """Which tokens a sequence holds, and how often its output does; grows with the sequence."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._ids = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._counts = np.zeros(_FIRST_CAPACITY, dtype=np.float32)
        self._num_read = 0

    def update(self, tokens: Sequence[int], num_prompt: int) -> None:
        """Take in what `tokens` has gained since the last call."""
        for position in range(self._num_read, len(tokens)):
            self._add(tokens[position], int(position >= num_prompt))
        self._num_read = len(tokens)

    def view(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens, int64 `[n]`, and their counts in the output, float32 `[n]`."""
        size = len(self._index)
        return self._ids[:size], self._counts[:size]

    def _add(self, token: int, count: int) -> None:
        slot = self._index.setdefault(token, len(self._index))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += count


class LogitEditor:
    """Makes the edits of one request's rows.

    Args:
        request: grows from call to call.
        bad_words: token sequences that the output must not complete.
    """

    def __init__(self, request: Request, bad_words: Sequence[tuple[int, ...]] = ()) -> None:
        params = request.params
        self._request = request
        self._bad_words = bad_words
        self._biases = dict(params.logit_bias or ())
        self._penalized = _is_penalized(params)
        self._always = self._penalized or bool(self._biases) or bool(bad_words)
        self._history = History()

    def edits(self, logits: np.ndarray, *, bans: bool = True) -> Edits | None:
        """Return the edits of a row, or None if there are none.

        Args:
            logits: float32 `[vocab]`, the row.
            bans: forbid bad words, and to end below `min_tokens`.
        """
        forbidden = self._forbidden() if bans else set[int]()
        if not (self._penalized or self._biases or forbidden):
            return None
        ids, counts = np.zeros(0, np.int64), np.zeros(0, np.float32)
        if self._penalized:
            self._history.update(self._request.tokens, self._request.num_prompt)
            ids, counts = self._history.view()
        num_seen = len(ids)
        named = self._biases.keys() | forbidden
        if named:  # seldom, and to search a long history takes longer than to penalize it
            extra = np.fromiter(named, np.int64)
            ids = np.concatenate([ids, extra[~np.isin(extra, ids)]])
        values = logits[ids]
        self._add_biases(ids, values)
        if forbidden:
            values[np.isin(ids, np.fromiter(forbidden, np.int64))] = -np.inf
        if self._penalized:
            penalize(values[:num_seen], counts, self._request.params)
        return Edits(ids, values)

    def _add_biases(self, ids: np.ndarray, values: np.ndarray) -> None:
        if self._biases:
            biases = [self._biases.get(token, 0.0) for token in ids.tolist()]
            values += np.array(biases, dtype=np.float32)

    def _forbidden(self) -> set[int]:
        request = self._request
        longest = max(map(len, self._bad_words), default=0)
        output = request.tokens[max(request.num_prompt, request.num_tokens - longest) :]
        forbidden = {word[-1] for word in self._bad_words if _ends_with(output, word[:-1])}
        if request.num_output < request.params.min_tokens:
            forbidden |= request.stop_ids
        return forbidden

    @property
    def idle(self) -> bool:
        """Whether no row will be edited any more."""
        if self._always:
            return False
        request = self._request
        return not request.stop_ids or request.num_output >= request.params.min_tokens


def penalize(logits: np.ndarray, counts: np.ndarray, params: SamplingParams) -> None:
    """Make tokens less likely that were there before, in place.

    Args:
        logits: float32 `[n]`, of tokens that prompt or output hold.
        counts: float32 `[n]`, how often the output holds them.
        params: the penalties; repetition as in CTRL (arXiv 1909.05858, section 4.1), presence and
            frequency as OpenAI defines them.
    """
    repetition = np.float32(params.repetition_penalty or 1.0)
    logits[:] = np.where(logits > 0, logits / repetition, logits * repetition)
    logits -= np.float32(params.frequency_penalty) * counts
    logits -= np.float32(params.presence_penalty) * (counts > 0)


def bits_of(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return a set of tokens as uint32 `[ceil(vocab / 32)]`, a bit each."""
    flags = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    flags[np.fromiter(token_ids, np.int64)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)


def _is_penalized(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty not in {None, 1.0}
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _ends_with(output: list[int], prefix: tuple[int, ...]) -> bool:
    return not prefix or tuple(output[-len(prefix) :]) == prefix
