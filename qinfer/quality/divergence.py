"""KL divergence and agreement between two models' next-token distributions.

Direction: KL(baseline ‖ model), the expectation under the baseline; in nats per token. Both sides
are fp32 log-softmax rows, never clipped or rounded to fewer bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qinfer.errors import MethodMismatchError, NonFiniteError

DIRECTION = "KL(baseline || model)"


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a model's distributions lie from the baseline's, over the scored tokens.

    Args:
        mean: mean KL per token, in nats.
        p99: 99th percentile over tokens; likewise `p99_9`.
        max: the worst token.
        top1_agreement: share of tokens whose most likely token is the same, 0 to 1.
    """

    mean: float
    p99: float
    p99_9: float
    max: float
    top1_agreement: float


def kl_rows(baseline: Tensor, model: Tensor) -> Tensor:
    """Return KL(baseline ‖ model) of each row, at least 0; exactly 0 for equal rows.

    The fp32 rows are normalised again and summed in float64: a plain fp32 sum over a large
    vocabulary is off by about 1e-6 and can come out negative.

    Args:
        baseline: log-softmax rows, fp32 [tokens, vocab].
        model: the same, for the same tokens.

    Returns:
        float64 [tokens], in nats.

    Raises:
        MethodMismatchError: the shapes differ.
    """
    if baseline.shape != model.shape:
        raise MethodMismatchError(
            f"distributions of shape {tuple(model.shape)} cannot be compared with the baseline's "
            f"{tuple(baseline.shape)}; the vocabularies or the scored tokens differ"
        )
    log_p = torch.log_softmax(baseline.double(), dim=-1)
    log_q = torch.log_softmax(model.double(), dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1).clamp_min_(0.0)


def agreement_rows(baseline: Tensor, model: Tensor) -> Tensor:
    """Return whether both rows have the same most likely token; bool [tokens]."""
    return baseline.argmax(dim=-1) == model.argmax(dim=-1)


def summarize(kl: Sequence[NDArray[np.float64]], agrees: Sequence[NDArray[np.bool_]]) -> Divergence:
    """Summarize per-token figures, one array per window; every token weighs the same.

    Raises:
        NonFiniteError: a divergence is NaN or infinite; the message names window and token.
    """
    for index, values in enumerate(kl):
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            raise NonFiniteError(
                f"the KL divergence of window {index}, scored token {bad[0]} is "
                f"{values[bad[0]]}; one of the models gives non-finite logits there"
            )
    values = np.concatenate(kl)
    p99, p99_9 = np.percentile(values, [99.0, 99.9])
    return Divergence(
        mean=float(values.mean()),
        p99=float(p99),
        p99_9=float(p99_9),
        max=float(values.max()),
        top1_agreement=float(np.concatenate(agrees).mean()),
    )
