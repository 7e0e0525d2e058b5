"""The mathematics of KV conditioning, against literal formulas and exact arithmetic."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qinfer.errors import QuantizationError
from qinfer.quant import rtn
from qinfer.quant.conditioning import (
    CHOICES,
    AttentionSample,
    PairSizes,
    activation_limits,
    attention_errors,
    candidate_exponents,
    choose,
    exponent_limits,
    fold,
    no_limits,
    pair_sizes,
    powers_of_two,
    restored_keys,
    scale_limits,
)
from qinfer.schemes import KV_SCHEMES, WeightScheme

INT8 = KV_SCHEMES["int8"]


def make_sample(
    tokens: int = 11, heads: int = 4, kv_heads: int = 2, dim: int = 8, seed: int = 0
) -> AttentionSample:
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(tokens, kv_heads, dim, generator=generator)
    k[:, 0, 1] *= 50  # an outlier in one channel of pair 1
    return AttentionSample(
        torch.randn(tokens, heads, dim, generator=generator),
        k,
        torch.randn(tokens, kv_heads, dim, generator=generator),
    )


def bf16_up(x: float) -> float:
    """Round a positive number up to 8 significant bits."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(math.ceil(mantissa * 256), exponent - 8)


def stored(vector: list[float], factors: list[float]) -> list[float]:
    """Divide, quantize to INT8, restore and multiply again, number by number."""
    divided = [x / f for x, f in zip(vector, factors, strict=True)]
    scale = bf16_up(max(abs(x) for x in divided) / 127)
    return [round(x / scale) * scale * f for x, f in zip(divided, factors, strict=True)]


def attend(q: list[float], keys: list[list[float]], values: list[list[float]]) -> tuple[float, ...]:
    scores = [sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q)) for k in keys]
    weights = [math.exp(score - max(scores)) for score in scores]
    total = sum(weights)
    return tuple(
        sum(w * v[channel] for w, v in zip(weights, values, strict=True)) / total
        for channel in range(len(values[0]))
    )


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (3, 1)])
def test_errors_are_those_of_textbook_attention(
    window: int | None, heads: int, kv_heads: int
) -> None:
    sample = make_sample(heads=heads, kv_heads=kv_heads)
    exponents = torch.tensor([[0, 0, 0, 0], [-1, 5, 0, -2]]).unsqueeze(1).repeat(1, kv_heads, 1)
    errors = attention_errors(sample, exponents, INT8, window)
    group = heads // kv_heads
    for head in range(kv_heads):
        keys, values = sample.k[:, head].tolist(), sample.v[:, head].tolist()
        energy = 0.0
        squared = [0.0, 0.0]
        for index, candidate in enumerate(exponents[:, head].tolist()):
            factors = [2.0**e for e in candidate] * 2
            restored = [stored(key, factors) for key in keys]
            for query_head in range(head * group, (head + 1) * group):
                for token, q in enumerate(sample.q[:, query_head].tolist()):
                    seen = slice(0 if window is None else max(0, token + 1 - window), token + 1)
                    exact = attend(q, keys[seen], values[seen])
                    out = attend(q, restored[seen], values[seen])
                    squared[index] += sum((a - b) ** 2 for a, b in zip(out, exact, strict=True))
                    energy += sum(a * a for a in exact) if index == 0 else 0.0
        assert errors.squared[:, head].tolist() == pytest.approx(squared, rel=1e-3)
        assert float(errors.energy[head]) == pytest.approx(energy, rel=1e-4)


def test_blocks_of_queries_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = make_sample(tokens=40)
    exponents = torch.tensor([[[0, 0, 0, 0]], [[0, 5, 0, 0]]])
    whole = attention_errors(sample, exponents, INT8, 7)
    monkeypatch.setattr("qinfer.quant.conditioning._QUERY_ROWS", 14)
    cut = attention_errors(sample, exponents, INT8, 7)
    assert torch.allclose(whole.squared, cut.squared, rtol=1e-4)
    assert torch.allclose(whole.energy, cut.energy, rtol=1e-5)


def test_restored_keys_without_factors_are_those_of_the_cache() -> None:
    sample = make_sample()
    keys = restored_keys(sample.k, torch.zeros(1, 4, dtype=torch.int64), INT8)
    for token in range(len(keys)):
        for head in range(2):
            expected = stored(sample.k[token, head].tolist(), [1.0] * 8)
            assert keys[token, head].tolist() == pytest.approx(expected, rel=1e-6)


def test_sizes_join_both_channels_and_leave_out_the_first_tokens() -> None:
    sample = make_sample()
    sample.k[:4] = 1e6
    sample.q[:4] = 1e6
    others = make_sample(seed=1)
    sizes = pair_sizes([sample, others], shared=False)
    for found, parts, group in (
        (sizes.keys, (sample.k, others.k), 1),
        (sizes.queries, (sample.q, others.q), 2),
    ):
        vectors = torch.cat([part[4:] for part in parts])
        for head in range(2):
            own = vectors[:, head * group : (head + 1) * group]
            for pair in range(4):
                values = own[:, :, [pair, pair + 4]].flatten().tolist()
                expected = math.sqrt(sum(x * x for x in values) / len(values))
                assert float(found[head, pair]) == pytest.approx(expected)
    shared = pair_sizes([sample, others], shared=True)
    assert shared.keys.shape == shared.queries.shape == (1, 4)
    assert torch.allclose(shared.keys[0].square(), sizes.keys.square().mean(0))
    assert torch.allclose(shared.queries[0].square(), sizes.queries.square().mean(0))


def test_windows_of_a_few_tokens_still_count() -> None:
    sample = make_sample(tokens=3)
    expected = sample.k.double().square().unflatten(-1, (2, 4)).mean((0, 2)).sqrt()
    assert torch.allclose(pair_sizes([sample], shared=False).keys, expected)


def sizes_of(keys: list[list[float]], queries: list[list[float]]) -> PairSizes:
    return PairSizes(
        torch.tensor(keys, dtype=torch.float64), torch.tensor(queries, dtype=torch.float64)
    )


def test_candidates_are_rounded_powers_of_the_sizes() -> None:
    keys, queries = [1.0, 64.0, 0.125, 1.0], [8.0, 0.5, 32.0, 2.0]
    sizes = sizes_of([keys, [3.0] * 4], [queries, [5.0] * 4])
    candidates = candidate_exponents(sizes, no_limits(2, 4))
    key_mean, query_mean = (sum(map(math.log2, x)) / 4 for x in (keys, queries))
    for index, (alpha, beta) in enumerate(CHOICES):
        expected = [
            round(alpha * (math.log2(k) - key_mean) - beta * (math.log2(q) - query_mean))
            for k, q in zip(keys, queries, strict=True)
        ]
        assert candidates[index, 0].tolist() == expected
        assert candidates[index, 1].tolist() == [0] * 4  # nothing to even out
    assert candidates[0].eq(0).all()


def test_what_a_model_moved_from_queries_to_keys_is_moved_back() -> None:
    """Where alpha + beta = 1, a factor planted in a pair comes out again, times the same rest."""
    before = sizes_of([[1.0, 3.0, 0.7, 2.0]], [[1.0, 0.4, 5.0, 1.0]])
    after = sizes_of([[1.0, 3.0 * 2**8, 0.7, 2.0]], [[1.0, 0.4 / 2**8, 5.0, 1.0]])
    moved = candidate_exponents(after, no_limits(1, 4)) - candidate_exponents(
        before, no_limits(1, 4)
    )
    for (alpha, beta), row in zip(CHOICES, moved[:, 0].tolist(), strict=True):
        if alpha + beta == 1:  # in relation to the other pairs
            assert [x - row[0] for x in row] == [0, 8, 0, 0]


def test_a_pair_that_is_always_zero_gets_no_factor_and_has_no_say() -> None:
    sizes = sizes_of([[0.0, 4.0, 16.0, 8.0, 1.0], [0.0] * 5], [[1.0] * 4 + [0.0]] * 2)
    index = CHOICES.index((1.0, 0.0))
    candidates = candidate_exponents(sizes, no_limits(2, 5))
    assert candidates[index].tolist() == [[0, -1, 1, 0, 0], [0] * 5]


def test_the_least_error_is_chosen_and_no_factor_wins_ties() -> None:
    errors = torch.tensor([[1.0, 2.0, 0.0], [1.0, 1.0, 0.0], [1.0, 0.5, 1.0], [2.0, 0.5, 0.0]])
    assert choose(errors).tolist() == [0, 2, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@given(data=st.data())
def test_folding_within_the_limits_is_exact(dtype: torch.dtype, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 1 << 20))
    generator = torch.Generator().manual_seed(seed)
    spread = data.draw(st.sampled_from([0, 4, 12, 40]))
    kv_heads, group, pairs = 2, 3, 4

    def tensor(rows: int, *columns: int) -> torch.Tensor:
        x = torch.randn(rows, *columns, generator=generator)
        scale = (torch.randn(rows, *columns, generator=generator) * spread).exp2()
        x = (x * scale).to(dtype)
        return x.masked_fill(~x.isfinite(), 1.0)

    scaled = {
        "self_attn.q_proj": tensor(kv_heads * group * pairs * 2, 5),
        "self_attn.k_proj": tensor(kv_heads * pairs * 2, 5),
        "self_attn.q_proj.bias": tensor(kv_heads * group * pairs * 2),
        "self_attn.k_proj.bias": tensor(kv_heads * pairs * 2),
    }
    low, high = exponent_limits(scaled, kv_heads, pairs)
    assert (low <= 0).all()
    assert (high >= 0).all()
    share = torch.rand(kv_heads, pairs, generator=generator)
    low, high = low.clamp_min(-60), high.clamp_max(60)
    exponents = (low + share * (high - low)).floor().long()
    folded = fold(scaled, exponents)
    for name, before in scaled.items():
        after = folded[name]
        assert after.dtype == dtype
        assert after.isfinite().all()
        sign = 1 if ".q_" in name else -1
        heads = before.view(-1, pairs * 2, *before.shape[1:])
        changed = after.view(-1, pairs * 2, *before.shape[1:])
        for head in range(len(heads)):
            kv_head = head // group if ".q_" in name else head
            for channel in range(pairs * 2):
                exponent = sign * int(exponents[kv_head, channel % pairs])
                exact = heads[head, channel].double() * 2.0**exponent
                assert torch.equal(changed[head, channel].double(), exact)


def test_a_fold_that_would_lose_bits_is_refused() -> None:
    scaled = {"self_attn.k_proj": torch.full((4, 3), 2.0**-14 + 2.0**-24, dtype=torch.float16)}
    with pytest.raises(QuantizationError, match=r"self_attn\.k_proj.*2\^-1.*float16"):
        fold(scaled, torch.tensor([[1, 0]]))
    large = {"self_attn.q_proj": torch.full((4, 3), 40000.0, dtype=torch.float16)}
    with pytest.raises(QuantizationError, match=r"self_attn\.q_proj"):
        fold(large, torch.tensor([[1, 0]]))


def test_limits_keep_numbers_normal() -> None:
    q = torch.ones(4, 2, dtype=torch.float16)
    k = torch.ones(4, 2, dtype=torch.float16)
    scaled = {"self_attn.q_proj": q, "self_attn.k_proj": k}
    low, high = exponent_limits(scaled, 1, 2)
    # q grows by at most 2^15 and shrinks by 2^14; k the other way round.
    assert (low.tolist(), high.tolist()) == ([[-14, -14]], [[14, 14]])
    k[3, 1] = 2.0**-13  # pair 1, which may now be divided by 2 only
    low, high = exponent_limits(scaled, 1, 2)
    assert (low.tolist(), high.tolist()) == ([[-14, -14]], [[14, 1]])
    k[3, 1] = 2.0**-20  # subnormal: it may only grow
    low, high = exponent_limits(scaled, 1, 2)
    assert (low.tolist(), high.tolist()) == ([[-14, -14]], [[14, 0]])
    k[1], k[3] = 0, 0  # a row of zeros limits nothing
    assert exponent_limits(scaled, 1, 2)[1].tolist() == [[14, 15]]


def test_activations_keep_room_in_float16() -> None:
    sample = make_sample()
    sample.q[3, 1, 5] = -3000.0  # kv head 0, pair 1
    sample.k[2, 1, 2] = 20000.0  # kv head 1, pair 2: more than the room, so it may only shrink
    low, high = activation_limits([make_sample(seed=2), sample], shared=False)
    assert int(high[0, 1]) == 1
    assert int(low[1, 2]) == 0
    assert int(high[1, 1]) > 5
    shared = activation_limits([make_sample(seed=2), sample], shared=True)
    assert torch.equal(shared[0], low.amax(0, keepdim=True))
    assert torch.equal(shared[1], high.amin(0, keepdim=True))


def test_an_outlier_pair_is_found_and_evened_out() -> None:
    """One pair of the keys is 64 times the rest, its queries a 64th: the scores are as without.

    Conditioning must bring the error back to what it is for keys without the outlier.
    """
    sample = make_sample(tokens=64, dim=32)
    sample.k[:, 0, 1] /= 50
    plain = attention_errors(sample, torch.zeros(1, 2, 16, dtype=torch.int64), INT8, None)
    sample.k[:, 0, [1, 17]] *= 64
    sample.q[:, :2, [1, 17]] /= 64
    candidates = candidate_exponents(pair_sizes([sample], shared=False), no_limits(2, 16))
    errors = attention_errors(sample, candidates, INT8, None).squared
    best = choose(errors)
    after = errors[best, torch.arange(2)]
    assert (after <= errors[0]).all()
    assert after[0] < 1.5 * plain.squared[0, 0] < 0.1 * errors[0, 0]
    assert sum(CHOICES[int(best[0])]) == 1


def test_powers_are_exact() -> None:
    exponents = torch.arange(-120, 120)
    assert powers_of_two(exponents).tolist() == [2.0**e for e in range(-120, 120)]


@given(data=st.data())
def test_scales_stay_fine_and_finite_within_their_limits(data: st.DataObject) -> None:
    """Whatever weights and factors: plain rounding of the folded weight says what scales become."""
    bits, size = data.draw(st.sampled_from((2, 3, 4, 8))), data.draw(st.sampled_from((8, None)))
    scheme, pairs, heads = WeightScheme(bits, size), 2, 2
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scaled = {}
    for name, rows in (("self_attn.q_proj", 4 * heads * pairs), ("self_attn.k_proj", 8)):
        size_of = data.draw(st.integers(-22, 17))
        rest = torch.randn(rows, 16, generator=generator)
        scaled[name] = rest * 2.0**size_of
    schemes: dict[str, WeightScheme | None] = dict.fromkeys(scaled, scheme)
    low, high = scale_limits(scaled, {**schemes, "self_attn.o_proj": scheme}, heads, pairs)
    assert bool((low <= 0).all() and (high >= 0).all())
    before = _scales_of(scaled, scheme)
    if before is None:
        return
    for exponents in (low.clamp_min(-30), high.clamp_max(30)):
        after = _scales_of(fold(scaled, exponents), scheme)
        assert after is not None
        for name, scales in after.items():
            least = torch.minimum(before[name], torch.tensor(2.0 ** (bits - 24)))
            assert bool((scales >= least * 0.999).all()), name


def _scales_of(
    weights: dict[str, torch.Tensor], scheme: WeightScheme
) -> dict[str, torch.Tensor] | None:
    """Return the float16 scales of plain rounding; None if one is too large."""
    try:
        return {name: rtn.quantize(w, scheme).scales.float() for name, w in weights.items()}
    except QuantizationError:
        return None


def test_weights_that_stay_as_they_are_limit_no_scale() -> None:
    scaled = {
        "self_attn.q_proj": torch.full((4, 8), 1e-7),
        "self_attn.q_norm.weight": torch.ones(4),
    }
    low, high = scale_limits(scaled, {"self_attn.q_proj": None, "other": WeightScheme(4, 8)}, 1, 2)
    free = no_limits(1, 2)
    assert torch.equal(low, free[0])
    assert torch.equal(high, free[1])
