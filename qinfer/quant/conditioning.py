"""KV conditioning: factors on rotary pairs of q and k that keep outliers out of a quantized cache.

A rotary pair of a key may be divided by any positive number if the same pair of the queries that
meet it is multiplied by it: the rotation commutes with the factor and the scores stay the same
(SmoothAttention, QServe, arXiv 2405.04532, section 4.2, where the factor is a fixed power of the
key). Here the factors are `rms(key) ** alpha / rms(query) ** beta` of the pair, rounded to powers
of two, so that folding them into weights, scales, biases or norms changes no significant bit;
alpha and beta are searched per head by the error of the attention output under the very formula
that stores keys. Where alpha + beta = 1, what is stored does not depend on how a model happens to
share the size of a pair between key and query, so an outlier of that kind leaves no trace.

Tensors in, exponents out: nothing here knows of blocks, files or models. Factors are always given
as exponents of two, int64 `[heads, head_dim / 2]`, where heads are kv heads or a single row that
all of them share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qinfer.errors import QuantizationError
from qinfer.kernels.reference import dequantize_kv, quantize_kv
from qinfer.schemes import KVScheme, WeightScheme

# (alpha, beta). The first is no factor at all, and wins ties.
CHOICES = (
    (0.0, 0.0),
    (0.25, 0.0),
    (0.5, 0.0),
    (0.75, 0.0),
    (1.0, 0.0),
    (0.75, 0.25),
    (0.5, 0.5),
)
# The first tokens of a text draw attention whatever they say, with keys unlike all others.
SKIPPED_TOKENS = 4
# Activations keep this far from the largest float16, in which other engines may run the model.
_LARGEST_ACTIVATION = 8192.0
# Exponents of float16: its smallest step, and the largest power of two.
_SCALE_STEP, _LARGEST_SCALE = -24, 15
_NO_LIMIT = 1 << 20
_QUERY_ROWS = 512  # scores of so many query rows are in memory at a time

Limits = tuple[torch.Tensor, torch.Tensor]  # lowest and highest exponent, int64 [heads, pairs]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSample:
    """What attention reads in one window of a text that starts at position 0, float32.

    Args:
        q: rotated queries `[tokens, heads, head_dim]`.
        k: rotated keys `[tokens, kv_heads, head_dim]`.
        v: values, as keys.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def group_size(self) -> int:
        """Query heads that share a kv head."""
        return self.q.shape[1] // self.k.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class HeadErrors:
    """Squared errors of attention outputs, summed over tokens and the heads of a group.

    Args:
        squared: float64 `[candidates, kv_heads]`.
        energy: float64 `[kv_heads]`, the squared outputs without any error.
    """

    squared: torch.Tensor
    energy: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PairSizes:
    """Root mean squares of rotary pairs, both channels together, float64 `[heads, pairs]`.

    Args:
        keys: of a kv head, or of all.
        queries: of the query heads that meet it.
    """

    keys: torch.Tensor
    queries: torch.Tensor


def pair_sizes(samples: Sequence[AttentionSample], *, shared: bool) -> PairSizes:
    """Return the sizes of all rotary pairs over the tokens of all windows.

    Args:
        samples: windows; the first tokens of each are left out where there are others.
        shared: over all heads at once.
    """
    skipped = SKIPPED_TOKENS if any(len(s.k) > SKIPPED_TOKENS for s in samples) else 0
    heads = 1 if shared else samples[0].k.shape[1]

    def rms(parts: list[torch.Tensor]) -> torch.Tensor:
        vectors = torch.cat(parts)  # [tokens, heads, dim]
        pairs = vectors.shape[-1] // 2
        squares: torch.Tensor = vectors.double().square().view(len(vectors), heads, -1, pairs)
        return squares.mean(dim=(0, 2)).sqrt()

    return PairSizes(rms([s.k[skipped:] for s in samples]), rms([s.q[skipped:] for s in samples]))


def candidate_exponents(sizes: PairSizes, limits: Limits) -> torch.Tensor:
    """Return the exponents of the factors for each of `CHOICES`.

    The geometric mean of a head's factors is 1 before they are rounded to powers of two. A pair
    that is always zero has no say and gets none.

    Args:
        sizes: of keys and queries.
        limits: what can be folded; exponents beyond are clamped.

    Returns:
        int64 `[len(CHOICES), heads, pairs]`.
    """
    alive = (sizes.keys > 0) & (sizes.queries > 0)
    keys, queries = _centred_logs(sizes.keys, alive), _centred_logs(sizes.queries, alive)
    low, high = limits
    return torch.stack(
        [(alpha * keys - beta * queries).round().long().clamp(low, high) for alpha, beta in CHOICES]
    )


def attention_errors(
    sample: AttentionSample, exponents: torch.Tensor, scheme: KVScheme, window: int | None
) -> HeadErrors:
    """Return what quantizing the divided keys does to causal attention, for every candidate.

    Values stay as they are. The factors never touch the queries here: multiplying the restored
    keys by them is exact and the same.

    Args:
        sample: one window.
        exponents: int64 `[candidates, kv_heads or 1, pairs]`.
        scheme: how keys are stored.
        window: tokens that a query may see, itself included; None = all.
    """
    num_heads = sample.k.shape[1]
    energy = torch.zeros(num_heads, dtype=torch.float64)
    squared = torch.zeros(len(exponents), num_heads, dtype=torch.float64)
    restored = [restored_keys(sample.k, candidate, scheme) for candidate in exponents]
    distinct = _first_equal(exponents.expand(-1, num_heads, -1))
    rows = max(1, _QUERY_ROWS // sample.group_size)
    for start in range(0, len(sample.k), rows):
        queries = slice(start, min(start + rows, len(sample.k)))
        hidden = _hidden(queries, len(sample.k), window)
        for head in range(num_heads):
            exact = _attend(sample, sample.k, head, queries, hidden)
            energy[head] += exact.square().sum(dtype=torch.float64)
            for index, keys in enumerate(restored):
                if distinct[index][head] == index:
                    out = _attend(sample, keys, head, queries, hidden)
                    squared[index, head] += (out - exact).square().sum(dtype=torch.float64)
    for index, firsts in enumerate(distinct):
        squared[index] = squared[torch.tensor(firsts), torch.arange(num_heads)]
    return HeadErrors(squared, energy)


def restored_keys(k: torch.Tensor, exponents: torch.Tensor, scheme: KVScheme) -> torch.Tensor:
    """Return keys `[tokens, kv_heads, dim]` as a cache restores them, with the factors undone."""
    factors = powers_of_two(exponents).repeat(1, 2)  # [heads, dim]
    codes, scales = quantize_kv(k / factors, scheme)
    return dequantize_kv(codes, scales) * factors


def choose(errors: torch.Tensor) -> torch.Tensor:
    """Return the index of the least error per column; the first of equals, so no factor wins ties.

    Args:
        errors: float64 `[candidates, heads]`.
    """
    best = torch.zeros(errors.shape[1], dtype=torch.int64)
    for index in range(1, len(errors)):
        least = errors.gather(0, best.unsqueeze(0))[0]
        best = torch.where(errors[index] < least, index, best)
    return best


def exponent_limits(scaled: Mapping[str, torch.Tensor], num_heads: int, num_pairs: int) -> Limits:
    """Return the exponents that can be folded into tensors without touching a significant bit.

    Every value must stay a normal number of its type; where one is subnormal already, it may only
    grow. An exponent of 0 is always within.

    Args:
        scaled: see `fold`.
        num_heads: kv heads, or 1 where all share their factors.
        num_pairs: half the head's size.
    """
    rows = {name: _row_limits(tensor) for name, tensor in scaled.items()}
    return _joined(rows, num_heads, num_pairs)


def scale_limits(
    scaled: Mapping[str, torch.Tensor],
    schemes: Mapping[str, WeightScheme | None],
    num_heads: int,
    num_pairs: int,
) -> Limits:
    """Return the exponents that leave the float16 scales of weights fine enough, and finite.

    A scale of `bits` stays above `2 ** (bits - 24)`: rounded to float16's subnormal steps, it then
    moves the end of a range by at most a quarter of a code. One that is smaller already may only
    grow. An exponent of 0 is always within.

    Args:
        scaled: see `fold`.
        schemes: how those of the tensors will be quantized that will be; others are left out.
        num_heads: kv heads, or 1 where all share their factors.
        num_pairs: half the head's size.
    """
    rows = {
        name: _scale_limits(scaled[name], scheme)
        for name, scheme in schemes.items()
        if scheme is not None and name in scaled
    }
    return _joined(rows, num_heads, num_pairs)


def _joined(rows: Mapping[str, Limits], num_heads: int, num_pairs: int) -> Limits:
    """Return what suits all rows that share a factor, from what each may be multiplied by."""
    low, high = no_limits(num_heads, num_pairs)
    for name, limits in rows.items():
        down, up = limits if is_query(name) else (-limits[1], -limits[0])  # keys are divided
        # Query heads of a group lie next to each other: [kv heads, group * 2, pairs].
        low = torch.maximum(low, down.view(num_heads, -1, num_pairs).amax(1))
        high = torch.minimum(high, up.view(num_heads, -1, num_pairs).amin(1))
    return low, high


def no_limits(num_heads: int, num_pairs: int) -> Limits:
    """Return limits that nothing reaches."""
    high = torch.full((num_heads, num_pairs), _NO_LIMIT)
    return -high, high


def activation_limits(samples: Sequence[AttentionSample], *, shared: bool) -> Limits:
    """Return the exponents that leave queries and keys room in float16, as `exponent_limits`."""
    groups = 1 if shared else samples[0].k.shape[1]
    amax = [
        torch.stack([x.abs().amax(0) for x in parts])  # [samples, heads, dim]
        .amax(0)
        .view(groups, -1, parts[0].shape[-1] // 2)
        .amax(1)
        .double()
        for parts in ([s.q for s in samples], [s.k for s in samples])
    ]
    up, down = ((_LARGEST_ACTIVATION / x.clamp_min(1e-30)).log2().floor().long() for x in amax)
    return -down.clamp_min(0), up.clamp_min(0)


def fold(scaled: Mapping[str, torch.Tensor], exponents: torch.Tensor) -> dict[str, torch.Tensor]:
    """Multiply the rows that make queries by the factors and divide those that make keys.

    Args:
        scaled: weights, group scales, biases or norms with the output rows first, by names inside
            the block (`self_attn.q_proj...`, `self_attn.k_norm...`).
        exponents: int64 `[kv_heads or 1, pairs]`.

    Returns:
        New tensors under the same names.

    Raises:
        QuantizationError: a value would lose bits; names the tensor.
    """
    folded = {}
    per_channel = exponents.repeat(1, 2)  # [kv heads, dim]
    for name, tensor in scaled.items():
        repeats = len(tensor) // per_channel.numel()
        rows = per_channel.repeat_interleave(repeats, 0) if is_query(name) else -per_channel
        factors = powers_of_two(rows).view(-1, *[1] * (tensor.dim() - 1))
        wide = tensor.float()
        result = (wide * factors).to(tensor.dtype)
        if not torch.equal(result.float() / factors, wide):
            raise QuantizationError(
                f"{name}: factors from 2^{int(rows.min())} to 2^{int(rows.max())} cannot be folded "
                f"into {str(tensor.dtype).removeprefix('torch.')} without losing bits"
            )
        folded[name] = result
    return folded


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return `2 ** exponents` as float32, exactly."""
    return torch.ldexp(torch.ones(exponents.shape), exponents)


def is_query(name: str) -> bool:
    """Tell tensors that make queries from those that make keys, by their names in the block."""
    return name.startswith("self_attn.q_")


def _row_limits(tensor: torch.Tensor) -> Limits:
    """Return by which exponents each row of a tensor may be multiplied, int64 `[rows]`."""
    facts = torch.finfo(tensor.dtype)
    sizes = tensor.abs().flatten(1) if tensor.dim() > 1 else tensor.abs()[:, None]
    largest = sizes.amax(1).float()
    smallest = sizes.masked_fill(sizes == 0, torch.inf).amin(1).float()
    zero = largest == 0
    down = _exponent(torch.tensor(facts.tiny)) - _exponent(smallest.masked_fill(zero, 1.0))
    up = _exponent(torch.tensor(facts.max)) - _exponent(largest.masked_fill(zero, 1.0))
    down, up = down.clamp_max(0), up.clamp_min(0)
    return down.masked_fill(zero, -_NO_LIMIT), up.masked_fill(zero, _NO_LIMIT)


def _scale_limits(weight: torch.Tensor, scheme: WeightScheme) -> Limits:
    """Return by which exponents each row may be multiplied for its scales, int64 `[rows]`."""
    size = scheme.group_size or weight.shape[1]
    groups = torch.stack([part.abs().amax(1) for part in weight.float().split(size, 1)], dim=1)
    scales = 2 * groups / (2**scheme.bits - 1)
    largest = scales.amax(1)
    smallest = scales.masked_fill(scales == 0, torch.inf).amin(1)
    zero = largest == 0
    down = _SCALE_STEP + scheme.bits - _exponent(smallest.masked_fill(zero, 1.0))
    up = _LARGEST_SCALE - 1 - _exponent(largest.masked_fill(zero, 1.0))
    down, up = down.clamp_max(0), up.clamp_min(0)
    return down.masked_fill(zero, -_NO_LIMIT), up.masked_fill(zero, _NO_LIMIT)


def _exponent(positive: torch.Tensor) -> torch.Tensor:
    """Return `floor(log2(x))`, int64."""
    return torch.frexp(positive).exponent.long() - 1


def _centred_logs(sizes: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """Return log2 of the sizes less its mean over a head's pairs that are alive; 0 for others."""
    logs = torch.where(alive, sizes, 1.0).log2()
    mean = logs.sum(-1, keepdim=True) / alive.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(alive, logs - mean, 0.0)


def _attend(
    sample: AttentionSample,
    keys: torch.Tensor,
    head: int,
    queries: slice,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Attend with one group's queries over `keys`; returns `[group, rows, dim]`."""
    group = sample.group_size
    q = sample.q[queries, head * group : (head + 1) * group].transpose(0, 1)  # [group, rows, dim]
    scores = (q @ keys[: hidden.shape[1], head].T) * q.shape[-1] ** -0.5
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
    mixed: torch.Tensor = weights @ sample.v[: hidden.shape[1], head]
    return mixed


def _hidden(queries: slice, num_tokens: int, window: int | None) -> torch.Tensor:
    """Return bool `[rows, keys]`, true where causality or the sliding window forbid to look.

    Keys behind the last query are left out.
    """
    rows = torch.arange(queries.start, queries.stop)[:, None]
    keys = torch.arange(min(num_tokens, queries.stop))
    hidden = keys > rows
    return hidden if window is None else hidden | (keys <= rows - window)


def _first_equal(exponents: torch.Tensor) -> list[list[int]]:
    """Return for every candidate and head the first candidate with the same exponents."""
    return [
        [
            next(i for i in range(index + 1) if torch.equal(exponents[i, head], own))
            for head, own in enumerate(candidate)
        ]
        for index, candidate in enumerate(exponents)
    ]
