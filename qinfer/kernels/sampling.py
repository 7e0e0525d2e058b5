"""Choosing a token from a row of logits: what is asked for, and the reference in torch.

All is computed in float32 on one row, so a choice depends on its own row alone. In order: the
row's edits and the tokens that are allowed at all, temperature, typical, top-k, top-p, min-p; each
works on what the one before left. Tokens of equal logits are kept or dropped together, so no order
of sorting matters. `kernels.cpu.sampling` computes the same without sorting; the two differ where
a sum falls within its rounding of a border, about one draw in a million.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

_TOP_P_FIRST_TRY = 256


@dataclass(frozen=True, slots=True, eq=False)
class Edits:
    """Logits of a row that are replaced.

    Args:
        token_ids: int64 `[edits]`, each once.
        values: float32 `[edits]`, the logits that they get; -inf forbids a token.
    """

    token_ids: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One token to choose.

    Args:
        row: of the logits.
        number: in [0, 1), where in the cumulative distribution to draw.
        temperature: 0 = the most likely token, the lowest id of equals.
        typical_p: 1 = all.
        top_k: 0 = all.
        top_p: 1 = all.
        min_p: 0 = all.
        edits: logits that are replaced first; None = none.
        allowed: uint32 `[ceil(vocab / 32)]`, a bit per token that may be chosen; None = all.
    """

    row: int
    number: float = 0.0
    temperature: float = 0.0
    typical_p: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    edits: Edits | None = None
    allowed: np.ndarray | None = None


def choose(logits: torch.Tensor, draw: Draw) -> int:
    """Return the token that `draw` chooses from its row, or -1 if it leaves none.

    Args:
        logits: float32 `[vocab]` on the CPU.
        draw: `row` is not looked at.
    """
    logits = edited(logits, draw)
    largest = logits.max()
    if largest.isneginf():
        return -1
    if draw.temperature == 0.0:
        return int(torch.argmax(logits))  # of equal ones the lowest id
    return pick(filtered((logits - largest) / draw.temperature, draw), draw.number)


def edited(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Return a row with the edits of a draw, and -inf where it allows no token."""
    if draw.edits is not None and draw.edits.token_ids.size:
        logits = logits.clone()
        logits[torch.from_numpy(draw.edits.token_ids)] = torch.from_numpy(draw.edits.values)
    if draw.allowed is None:
        return logits
    bits = np.unpackbits(draw.allowed.view(np.uint8), bitorder="little")[: logits.shape[0]]
    return logits.masked_fill(torch.from_numpy(bits == 0), -torch.inf)


def filtered(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Set to -inf what the filters of a draw drop.

    Args:
        logits: float32 `[vocab]`, cooled and relative to the largest, which is 0.
        draw: its temperature is not looked at.
    """
    if draw.typical_p < 1.0:
        logits = keep_typical(logits, draw.typical_p)
    if draw.top_k > 0:
        logits = keep_top_k(logits, draw.top_k)
    if draw.top_p < 1.0:
        logits = keep_top_p(logits, draw.top_p)
    if draw.min_p > 0.0:
        logits = keep_min_p(logits, draw.min_p)
    return logits


def keep_typical(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the tokens whose surprise is closest to the entropy (arXiv 2202.00666).

    The smallest set in that order whose probability reaches `p`. The most likely token need not
    be among them.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    probs = logprobs.exp()
    entropy = -torch.where(probs > 0, logprobs * probs, 0.0).sum()
    distance = (-logprobs - entropy).abs()
    order = torch.argsort(distance)
    before = probs[order].double().cumsum(0) - probs[order]
    last = order[int((before < p).sum()) - 1]
    return logits.masked_fill(distance > distance[last], -torch.inf)


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Set all but the `k` largest of `logits` `[vocab]` to -inf."""
    if k >= logits.shape[0]:
        return logits
    return logits.masked_fill(logits < torch.topk(logits, k).values[-1], -torch.inf)


def keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the smallest set of tokens whose probability reaches `p` (arXiv 1904.09751)."""
    total = torch.logsumexp(logits.double(), dim=-1)
    for size in (min(_TOP_P_FIRST_TRY, logits.shape[0]), logits.shape[0]):
        top = torch.topk(logits, size).values  # [size], descending
        probs = (top.double() - total).exp()
        num_kept = int((probs.cumsum(0) - probs < p).sum())  # mass of the more likely tokens
        if num_kept < size:
            break
    return logits.masked_fill(logits < top[num_kept - 1], -torch.inf)


def keep_min_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep tokens of at least `p` times the highest probability (arXiv 2407.01082)."""
    return logits.masked_fill(logits < logits.max() + math.log(p), -torch.inf)


def pick(logits: torch.Tensor, number: float) -> int:
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
