"""KL divergence: by hand, against itself, against torch, and where it must be refused."""

import math

import numpy as np
import pytest
import torch

from qinfer.errors import MethodMismatchError, NonFiniteError
from qinfer.quality.divergence import agreement_rows, kl_rows, summarize


def _random_rows(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(5 * torch.randn(rows, vocab, generator=generator), dim=-1)


def test_b05_a_pair_by_hand_with_the_direction() -> None:
    """B05: KL(baseline || model), the expectation under the baseline."""
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    forward = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    result = kl_rows(torch.tensor([p]).log(), torch.tensor([q]).log())
    assert result.item() == pytest.approx(forward, abs=1e-7)
    skew = kl_rows(torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()).item()
    assert skew == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), abs=1e-7)
    back = kl_rows(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()).item()
    assert back != pytest.approx(skew, abs=1e-2)


def test_b05_against_itself_it_is_exactly_zero() -> None:
    """B05: exactly 0 and 100 % agreement for a model against itself."""
    rows = _random_rows(8, 49152)
    assert kl_rows(rows, rows.clone()).tolist() == [0.0] * 8
    assert agreement_rows(rows, rows.clone()).all()


def test_b05_never_negative_even_for_rounding_noise() -> None:
    """B05: rows that differ by fp32 rounding only."""
    rows = _random_rows(32, 49152)
    noisy = torch.log_softmax(rows + 3.0, dim=-1)
    result = kl_rows(rows, noisy)
    assert (result >= 0).all()
    assert (result < 1e-9).all()


def test_it_equals_torch_in_float64() -> None:
    base, model = _random_rows(16, 1000), _random_rows(16, 1000, seed=1)
    expected = torch.nn.functional.kl_div(
        model.double(), base.double(), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(kl_rows(base, model), expected, rtol=1e-5, atol=1e-7)


def test_b05_no_clipping_of_unlikely_tokens() -> None:
    """B05: a token far below the maximum still counts (stored logits must not be clipped)."""
    base = torch.log_softmax(torch.tensor([[0.0, -40.0]]), -1)
    model = torch.log_softmax(torch.tensor([[-40.0, 0.0]]), -1)
    assert kl_rows(base, model).item() == pytest.approx(40.0, rel=1e-6)


def test_other_shapes_are_no_comparison() -> None:
    with pytest.raises(MethodMismatchError, match="vocabular"):
        kl_rows(_random_rows(2, 10), _random_rows(2, 11))


def test_summary_weighs_tokens_not_windows() -> None:
    kl = [np.array([1.0]), np.array([0.0, 0.0, 0.0])]
    agrees = [np.array([False]), np.array([True, True, True])]
    result = summarize(kl, agrees)
    assert result.mean == pytest.approx(0.25)
    assert result.max == 1.0
    assert result.top1_agreement == pytest.approx(0.75)
    assert result.p99 <= result.p99_9 <= result.max


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_figures_name_window_and_token(value: float) -> None:
    kl = [np.zeros(3), np.array([0.0, value])]
    with pytest.raises(NonFiniteError, match="window 1, scored token 1"):
        summarize(kl, [np.ones(3, dtype=bool), np.ones(2, dtype=bool)])
