"""Perplexity: how a text is cut into windows, and what is made of the scores.

Pure functions on token ids and log-probabilities; it knows no model. Nothing is ever padded, so
no padding can be counted: a short last window is scored as it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qinfer.errors import ConfigError

BOOTSTRAP_RESAMPLES = 1000
BOOTSTRAP_SEED = 0
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of the text that is scored in one go.

    Args:
        token_ids: what the model reads, a BOS token included where the method adds one.
        first_scored: index into `token_ids` of the first token whose prediction counts; the ones
            before it are context only.
    """

    token_ids: tuple[int, ...]
    first_scored: int

    @property
    def num_scored(self) -> int:
        """Tokens whose prediction counts."""
        return len(self.token_ids) - self.first_scored

    @property
    def scored_ids(self) -> tuple[int, ...]:
        """The tokens whose prediction counts."""
        return self.token_ids[self.first_scored :]


def cut_windows(
    token_ids: Sequence[int],
    *,
    window: int,
    stride: int,
    num_windows: int | None = None,
    bos_token_id: int | None = None,
) -> list[Window]:
    """Cut a tokenized text into windows, each token scored at most once.

    Window `i` starts at token `i * stride`. It scores the tokens that no window before it has
    scored; the very first token of a window has no context and is never scored, unless a BOS
    token precedes it. The last window may be shorter; one without a token to score is dropped.

    Args:
        token_ids: the whole text, tokenized in one piece.
        window: tokens of a window, the added BOS included.
        stride: tokens from one window's start to the next; at most `window` (less the BOS).
        num_windows: stop after so many; None = the whole text.
        bos_token_id: put this token in front of every window; None = add nothing.

    Raises:
        ConfigError: sizes that cannot work, or a text too short to score a token.
    """
    content = window - (bos_token_id is not None)
    if content < 2:
        raise ConfigError(f"window {window} is too small: it must hold at least two text tokens")
    if not 1 <= stride <= content:
        raise ConfigError(
            f"stride {stride} must be from 1 to {content}, the text tokens of a window; "
            "a larger one would leave tokens unscored"
        )
    if num_windows is not None and num_windows < 1:
        raise ConfigError(f"num_windows {num_windows} must be at least 1")
    result: list[Window] = []
    scored_to = 0
    prefix = () if bos_token_id is None else (bos_token_id,)
    for start in range(0, len(token_ids), stride):
        if len(result) == num_windows or scored_to == len(token_ids):
            break
        end = min(start + content, len(token_ids))
        first = max(scored_to - start, 0 if prefix else 1)
        if first < end - start:
            ids = prefix + tuple(token_ids[start:end])
            result.append(Window(ids, first + len(prefix)))
        scored_to = end
    if not result:
        raise ConfigError(
            f"the text has {len(token_ids)} tokens; at least {2 - len(prefix)} are needed to score"
        )
    return result


def mean_nll(logprobs: Sequence[Sequence[float]]) -> float:
    """Return the mean negative log-likelihood per token over all sequences, in nats.

    Every token weighs the same: the sum over all sequences divided by all tokens, never a mean
    of the sequences' means.

    Args:
        logprobs: natural log-probabilities of the scored tokens, one list per sequence.
    """
    total = math.fsum(value for sequence in logprobs for value in sequence)
    return -total / sum(len(sequence) for sequence in logprobs)


def perplexity(logprobs: Sequence[Sequence[float]]) -> float:
    """Return exp(sum of NLL / scored tokens)."""
    return math.exp(mean_nll(logprobs))


def bits_per_byte(logprobs: Sequence[Sequence[float]], num_bytes: int) -> float:
    """Return the NLL in bits divided by the UTF-8 bytes of the scored tokens.

    Unlike perplexity it does not depend on the tokenizer.
    """
    total = math.fsum(value for sequence in logprobs for value in sequence)
    return -total / math.log(2) / num_bytes


def word_perplexity(logprobs: Sequence[Sequence[float]], num_words: int) -> float | None:
    """Return exp(sum of NLL / words); None where that is no finite number."""
    total = math.fsum(value for sequence in logprobs for value in sequence)
    exponent = -total / num_words if num_words else math.inf
    return math.exp(exponent) if exponent < 700 else None


def drift_percent(
    logprobs: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]
) -> float:
    """Return by how many percent the perplexity lies above the baseline's, on the same tokens."""
    return 100.0 * math.expm1(mean_nll(logprobs) - mean_nll(baseline))


def perplexity_interval(logprobs: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of the perplexity, resampling whole windows.

    The percentile method (Efron 1979) with a fixed seed; None for fewer than two windows.
    """
    interval = _bootstrap(logprobs, None)
    return None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))


def drift_interval(
    logprobs: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]
) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of `drift_percent`, in percent.

    Paired: both models are resampled by the same windows, so that what is hard for both cancels.
    """
    interval = _bootstrap(logprobs, baseline)
    if interval is None:
        return None
    return 100.0 * math.expm1(interval[0]), 100.0 * math.expm1(interval[1])


def _bootstrap(
    logprobs: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]] | None
) -> tuple[float, float] | None:
    """Resample windows; return the interval of the (difference of) mean NLL."""
    num = len(logprobs)
    if num < 2:
        return None
    counts = np.array([len(sequence) for sequence in logprobs], dtype=np.float64)  # [windows]
    sums = np.array([-math.fsum(sequence) for sequence in logprobs])
    if baseline is not None:
        sums = sums - np.array([-math.fsum(sequence) for sequence in baseline])
    picks = np.random.default_rng(BOOTSTRAP_SEED).integers(0, num, (BOOTSTRAP_RESAMPLES, num))
    means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)  # [resamples]
    tail = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100.0 - tail])
    return float(low), float(high)
