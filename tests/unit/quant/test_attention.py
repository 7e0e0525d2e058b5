"""Attention over a whole sample: against the softmax of all scores in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qinfer.quant.attention import causal_attention


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the textbook's result, and the same of the values' magnitudes; float64."""
    group = q.shape[1] // k.shape[1]
    keys, values = (part.double().repeat_interleave(group, dim=1) for part in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), keys) / q.shape[2] ** 0.5
    query, key = torch.arange(len(q))[:, None], torch.arange(len(q))
    seen = (key <= query) & (query - key < (window or len(q)))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    mixed, magnitude = (
        torch.einsum("hij,jhd->ihd", weights, part) for part in (values, values.abs())
    )
    return mixed, magnitude


def rows(tokens: int, heads: int, dim: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(seed))


def assert_close(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, dtype: torch.dtype
) -> None:
    """In bfloat16 weights, values and result are rounded once each: by up to 2^-8."""
    actual = causal_attention(q, k, v, window, dtype=dtype)
    expected, magnitude = attend(q, k, v, window)
    assert actual.dtype == torch.float32
    bound = (1e-5 if dtype == torch.float32 else 3.1 * 2**-8) * magnitude
    assert bool(((actual.double() - expected).abs() <= bound).all())


@given(
    tokens=st.sampled_from([1, 2, 63, 64, 65, 150, 192]),
    heads=st.sampled_from([(1, 1), (6, 2), (4, 4)]),
    dim=st.sampled_from([8, 64]),
    window=st.sampled_from([None, 1, 2, 63, 64, 65, 100, 500]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_matches_the_textbook(
    tokens: int, heads: tuple[int, int], dim: int, window: int | None, dtype: torch.dtype
) -> None:
    q, k, v = (rows(tokens, heads[part > 0], dim, part) for part in range(3))
    assert_close(q, k, v, window, dtype)


@pytest.mark.parametrize("window", [None, 70])
def test_large_scores_lose_nothing_in_bfloat16(window: int | None) -> None:
    """Keys with a common offset, as biases make them: its rounding would decide the softmax."""
    q, k, v = (rows(200, 2, 64, seed) for seed in range(3))
    assert float(torch.einsum("ihd,jhd->hij", q + 1, k + 50).max()) > 8 * 500
    assert_close(q + 1, k + 50, v, window, torch.bfloat16)
