"""From scores to the figures of a record, and the refusal to compare unlike methods."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qinfer.errors import MethodMismatchError
from qinfer.quality.divergence import Divergence, summarize
from qinfer.quality.perplexity import (
    Window,
    bits_per_byte,
    drift_interval,
    drift_percent,
    perplexity,
    perplexity_interval,
    word_perplexity,
)
from qinfer.quality.scoring import Scores
from qinfer.report.record import ContextDrift, DivergenceFigures, Method, Quality

JOIN = "the text as it stands, tokenized in one piece, no special tokens"
# A context length belongs to the first range that ends at or above it.
CONTEXT_ENDS = (31, 127, 511, 2047, 8191, 32767, 131071)


def require_same_method(first: Method, second: Method) -> None:
    """Refuse to compare figures whose methods differ.

    Raises:
        MethodMismatchError: lists every differing field with both values.
    """
    theirs = asdict(second)
    differing = [
        f"{name} ({value} / {theirs[name]})"
        for name, value in asdict(first).items()
        # The first two are names; what they stand for has a hash.
        if name not in {"text", "baseline"} and value != theirs[name]
    ]
    if differing:
        raise MethodMismatchError(
            f"the two measurements cannot be compared; they differ in {', '.join(differing)}"
        )


def tokens_sha256(windows: Sequence[Window]) -> str:
    """Return a hash of every window's token ids and scored range."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(f"{window.first_scored}:{','.join(map(str, window.token_ids))};".encode())
    return digest.hexdigest()


def checkpoint_sha256(path: Path) -> str:
    """Return a hash of a checkpoint's config.json and weight files, in the order of their names."""
    digest = hashlib.sha256()
    for file in [path / "config.json", *sorted(path.glob("*.safetensors"))]:
        digest.update(f"{file.name}\0".encode())
        with file.open("rb") as stream:
            while piece := stream.read(1 << 22):
                digest.update(piece)
    return digest.hexdigest()


def quality(method: Method, scores: Scores, baseline: Scores) -> Quality:
    """Return perplexity and drift of a model whose scores were taken by `method`."""
    return Quality(
        perplexity=perplexity(scores.logprobs),
        perplexity_interval=perplexity_interval(scores.logprobs),
        bits_per_byte=bits_per_byte(scores.logprobs, method.bytes_scored),
        word_perplexity=word_perplexity(scores.logprobs, method.words_scored),
        drift_percent=drift_percent(scores.logprobs, baseline.logprobs),
        drift_interval=drift_interval(scores.logprobs, baseline.logprobs),
    )


def divergence(windows: Sequence[Window], scores: Scores, baseline: Scores) -> DivergenceFigures:
    """Return the divergence figures of a model; the baseline's own are zero by definition."""
    if scores.kl is None or scores.agrees is None:
        result, kl = Divergence(0.0, 0.0, 0.0, 0.0, 1.0), [np.zeros(w.num_scored) for w in windows]
    else:
        result, kl = summarize(scores.kl, scores.agrees), scores.kl
    context = np.concatenate([np.arange(w.first_scored, len(w.token_ids)) for w in windows])
    change = np.concatenate(  # growth of the NLL per token, [tokens]
        [
            np.subtract(theirs, mine)
            for mine, theirs in zip(scores.logprobs, baseline.logprobs, strict=True)
        ]
    )
    return DivergenceFigures(
        mean=result.mean,
        p99=result.p99,
        p99_9=result.p99_9,
        max=result.max,
        top1_agreement=result.top1_agreement,
        by_context=_by_context(context, np.concatenate(kl), change),
    )


def _by_context(
    context: NDArray[np.int64], kl: NDArray[np.float64], change: NDArray[np.float64]
) -> tuple[ContextDrift, ...]:
    result = []
    low = 1
    for end in CONTEXT_ENDS:
        inside = (context >= low) & (context <= end)
        if inside.any():
            result.append(
                ContextDrift(
                    context_from=low,
                    context_to=end,
                    tokens=int(inside.sum()),
                    kld_mean=float(kl[inside].mean()),
                    drift_percent=100.0 * math.expm1(float(change[inside].mean())),
                )
            )
        low = end + 1
    return tuple(result)
