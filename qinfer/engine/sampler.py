"""Choosing the next token: small pure functions on one row of logits, composed per request.

Everything is computed in float32 and row by row, so a request's choice depends on its own row
alone. The random number of a draw is a function of (seed, sample index, output position): nothing
else in the batch can shift it, and a preempted request draws the same again.

Order, as in transformers: repetition penalty, forbidden tokens, temperature, top-k, top-p, min-p.
Tokens of equal probability are kept or dropped together, so no order of sorting matters.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from qinfer.engine.params import SamplingParams
from qinfer.engine.request import Request, TokenLogprob

GREEDY_TEMPERATURE = 1e-5
_TOP_P_FIRST_TRY = 256

Filter = Callable[[torch.Tensor], torch.Tensor]


def apply_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide `logits` `[vocab]` by `temperature`, with the maximum at 0 so nothing overflows."""
    return (logits - logits.max()) / temperature


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Set all but the `k` largest of `logits` `[vocab]` to -inf."""
    if k >= logits.shape[0]:
        return logits
    return logits.masked_fill(logits < torch.topk(logits, k).values[-1], -torch.inf)


def keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the smallest set of tokens whose probability reaches `p` (arXiv 1904.09751)."""
    probs = torch.softmax(logits, dim=-1)
    for size in (min(_TOP_P_FIRST_TRY, probs.shape[0]), probs.shape[0]):
        top = torch.topk(probs, size).values  # [size], descending
        before = top.double().cumsum(0) - top  # mass of the more likely tokens
        num_kept = int((before < p).sum())
        if num_kept < size:
            break
    return logits.masked_fill(probs < top[num_kept - 1], -torch.inf)


def keep_min_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep tokens of at least `p` times the highest probability (arXiv 2407.01082)."""
    return logits.masked_fill(logits < logits.max() + math.log(p), -torch.inf)


def penalize_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Make tokens less likely that were there before (CTRL, arXiv 1909.05858, section 4.1).

    Args:
        logits: `[vocab]`.
        seen: bool `[vocab]`.
        penalty: divides positive logits and multiplies negative ones.
    """
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalized, logits)


def filters_of(params: SamplingParams) -> tuple[Filter, ...]:
    """Return the steps from logits to the distribution that is drawn from, in order."""
    filters: list[Filter] = []
    temperature, top_k = params.temperature or 1.0, params.top_k or 0
    top_p, min_p = params.top_p or 1.0, params.min_p or 0.0
    if temperature != 1.0:
        filters.append(lambda logits: apply_temperature(logits, temperature))
    if top_k > 0:
        filters.append(lambda logits: keep_top_k(logits, top_k))
    if top_p < 1.0:
        filters.append(lambda logits: keep_top_p(logits, top_p))
    if min_p > 0.0:
        filters.append(lambda logits: keep_min_p(logits, min_p))
    return tuple(filters)


def uniform(seed: int, index: int, position: int) -> float:
    """Return the random number in [0, 1) of one draw; equal arguments, equal number."""
    key = struct.pack("<qqq", seed, index, position)
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) / (1 << 53)


def draw(logits: torch.Tensor, number: float) -> int:
    """Return the token at which the cumulative distribution of `logits` `[vocab]` passes `number`.

    Args:
        logits: -inf where a token must not be drawn.
        number: in [0, 1).
    """
    cumulative = torch.softmax(logits, dim=-1).double().cumsum(0)
    total = cumulative[-1]
    # Below the total even if the product rounds up: there the last possible token sits.
    target = torch.minimum(number * total, torch.nextafter(total, torch.zeros_like(total)))
    return int(torch.searchsorted(cumulative, target, right=True))


def top_logprobs(logits: torch.Tensor, token_id: int, count: int) -> TokenLogprob:
    """Return a token's log-probability under `logits` `[vocab]`, and the `count` most likely.

    Among equal ones the lower id comes first.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if count > 0:
        count = min(count, logprobs.shape[0])
        lowest = torch.topk(logprobs, count).values[-1]
        ids = (logprobs >= lowest).nonzero().flatten()
        values, order = torch.sort(logprobs[ids], descending=True, stable=True)
        top = tuple(zip(ids[order[:count]].tolist(), values[:count].tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), top)


class SamplerState:
    """What sampling one request needs beyond its row of logits; kept from step to step."""

    def __init__(self, request: Request, vocab_size: int, device: str) -> None:
        params = request.params
        self._request = request
        self.greedy = (params.temperature or 0.0) < GREEDY_TEMPERATURE
        self._filters = filters_of(params)
        self._penalty = params.repetition_penalty or 1.0
        size = vocab_size if self._penalty != 1.0 else 0
        self._seen = torch.zeros(size, dtype=torch.bool, device=device)
        self._num_seen = 0
        self._stop_ids = torch.tensor(sorted(request.stop_ids), dtype=torch.int64, device=device)

    @property
    def plain(self) -> bool:
        """Whether the next token is simply the most likely one."""
        return self.greedy and self._penalty == 1.0 and not self._stop_forbidden

    @property
    def _stop_forbidden(self) -> bool:
        request = self._request
        return bool(request.stop_ids) and request.num_output < request.params.min_tokens

    def choose(self, logits: torch.Tensor) -> int:
        """Return the next token of the request from its row of `logits` `[vocab]`."""
        if self._penalty != 1.0:
            logits = penalize_repetition(logits, self._history(), self._penalty)
        if self._stop_forbidden:
            logits = logits.index_fill(0, self._stop_ids, -torch.inf)
        if self.greedy:
            return int(torch.argmax(logits))
        for step in self._filters:
            logits = step(logits)
        request = self._request
        return draw(logits, uniform(request.seed, request.index, request.num_output))

    def _history(self) -> torch.Tensor:
        """Return which tokens the request holds; only the new ones are added."""
        new = torch.tensor(self._request.tokens[self._num_seen :], dtype=torch.int64)
        self._seen[new.to(self._seen.device)] = True
        self._num_seen = self._request.num_tokens
        return self._seen


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token, and its log-probabilities if they were asked for."""

    token_id: int
    logprob: TokenLogprob | None


def sample(
    logits: torch.Tensor, requests: Sequence[tuple[int, Request, SamplerState]]
) -> list[Sampled]:
    """Return the next token of each request.

    Args:
        logits: float32 `[rows, vocab]`.
        requests: its row, which must be finite, the request and its state.
    """
    any_plain = any(state.plain for _, _, state in requests)
    # Of equal ones argmax takes the lowest id.
    best: list[int] = torch.argmax(logits, dim=-1).tolist() if any_plain else []
    return [
        _sample_row(logits[row], request, best[row] if state.plain else state.choose(logits[row]))
        for row, request, state in requests
    ]


def _sample_row(logits: torch.Tensor, request: Request, token_id: int) -> Sampled:
    count = request.params.logprobs
    return Sampled(token_id, None if count is None else top_logprobs(logits, token_id, count))
