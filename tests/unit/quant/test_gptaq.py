"""What GPTAQ adds to weights."""

from pathlib import Path

import pytest
import torch

from qinfer.quant import gptaq, hessian
from qinfer.quant.gptaq import KeptShift, weight_shift
from qinfer.quant.hessian import InputStatistics
from qinfer.quant.solver import SolverOptions, solve_modules
from qinfer.quant.targets import Target
from qinfer.schemes import WeightScheme

PLAIN = SolverOptions(scale_search="absmax", passes=0)
BEST = SolverOptions(scale_search="hessian", passes=2)


@pytest.fixture(autouse=True)
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts here is what is solved, not how products are rounded."""
    monkeypatch.setattr(hessian, "sum_dtype", lambda: torch.float32)


def inputs(in_features: int = 96, tokens: int = 300, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(in_features, in_features, generator=generator)
    return torch.randn(tokens, in_features, generator=generator) @ mixing


def weight(rows: int, in_features: int) -> torch.Tensor:
    return torch.randn(rows, in_features, generator=torch.Generator().manual_seed(0))


def gathered(X: torch.Tensor, full: torch.Tensor) -> InputStatistics:
    stats = InputStatistics(X.shape[1], name="layer", paired=True)
    stats.add(X, sample=0, full=full)
    return stats


def least_squares(
    X: torch.Tensor, full: torch.Tensor, W: torch.Tensor, damp: float
) -> torch.Tensor:
    """Return the weight with the least `‖Ŵ X - W X_full‖² + λ ‖Ŵ - W‖²`."""
    pull = (damp * X.double().square().sum(0).mean()).sqrt()
    rows = torch.cat([X.double(), pull * torch.eye(X.shape[1], dtype=torch.float64)])
    goals = torch.cat([full.double() @ W.double().T, pull * W.double().T])
    solution: torch.Tensor = torch.linalg.lstsq(rows, goals).solution.T
    return solution


@pytest.mark.parametrize(("in_features", "tokens"), [(48, 400), (130, 400), (48, 20), (48, 1)])
@pytest.mark.parametrize("damp", [0.01, 0.1])
def test_a_shifted_weight_is_the_least_squares_weight(
    in_features: int, tokens: int, damp: float
) -> None:
    full = inputs(in_features, tokens)
    X = full + 0.3 * inputs(in_features, tokens, seed=1)
    W = weight(8, in_features)
    shift = weight_shift(gathered(X, full), damp)
    assert shift is not None
    expected = least_squares(X, full, W, damp)
    assert float((W + W @ shift - expected).abs().max()) < 2e-4
    assert float((W - expected).abs().max()) > 0.02


def test_samples_without_a_pair_that_come_later_change_nothing() -> None:
    full = inputs()
    X = full + 0.1 * inputs(seed=1)
    stats = gathered(X, full)
    shift = weight_shift(stats, 0.01)
    assert shift is not None
    kept = shift.clone()
    stats.add(inputs(seed=2), sample=1)
    assert torch.equal(shift, kept)
    both = torch.cat([X, inputs(seed=2)]).double()
    assert torch.allclose(stats.matrix().double(), 2 / 600 * both.T @ both, rtol=1e-4, atol=1e-3)


def test_without_pairs_or_differences_there_is_nothing_to_add() -> None:
    assert weight_shift(InputStatistics(48, name="layer", paired=True), 0.01) is None
    assert weight_shift(gathered(torch.zeros(9, 48), torch.zeros(9, 48)), 0.01) is None
    same = weight_shift(gathered(inputs(48), inputs(48)), 0.01)
    assert same is not None
    assert not bool(same.any())


def test_an_input_that_is_never_used_is_left_alone() -> None:
    full = inputs(48)
    X = full + 0.3 * inputs(48, seed=1)
    X[:, 7] = 0
    shift = weight_shift(gathered(X, full), 0.01)
    assert shift is not None
    assert bool(torch.isfinite(shift).all())
    assert not bool(shift[:, 7].any())


def test_more_damping_where_the_sums_are_not_positive_definite() -> None:
    full = inputs(64, 1)
    X = full + 0.1
    shift = weight_shift(gathered(X, full), 0.0)
    assert shift is not None
    W = weight(4, 64)
    # One token: the outputs of the unquantized model, but for the damping.
    assert torch.allclose((W + W @ shift) @ X.T, W @ full.T, rtol=0.2, atol=0.2)


@pytest.mark.parametrize("options", [PLAIN, BEST])
def test_a_linear_makes_up_for_what_was_lost_before_it(
    options: SolverOptions, tmp_path: Path
) -> None:
    full = inputs()
    X = full + 0.1 * inputs(seed=1)
    W, scheme = weight(32, 96), WeightScheme(4, 32, act_order=True)
    truth, lost = W @ full.T, []
    for wanted in (True, False):
        stats, target = gathered(X, full), Target("layer.a", 96, 32, scheme)
        kept = KeptShift(weight_shift(stats, 0.01) if wanted else None, tmp_path)
        (solved,) = solve_modules(stats, {"a": W}, {"a": target}, options, shift=kept.take)
        lost.append(float((solved[1].weight.dequantize() @ X.T - truth).square().sum()))
    assert lost[0] < 0.9 * lost[1]


@pytest.mark.parametrize("in_file", [False, True])
def test_what_is_kept_is_taken_once(
    in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gptaq, "WIDE_INPUTS", 48 if in_file else 49)
    shift = inputs(48, 48)
    kept = KeptShift(shift.clone(), tmp_path)
    assert not list(tmp_path.iterdir())  # the file has no name
    found = kept.take()
    assert found is not None
    assert torch.equal(found, shift)
    assert kept.take() is None
    assert KeptShift(None, tmp_path).take() is None


def test_a_shift_that_cannot_be_used_is_let_go(tmp_path: Path) -> None:
    stats = InputStatistics(96, name="layer")
    stats.add(torch.zeros(9, 96), sample=0)  # no Hessian to factor
    kept = KeptShift(inputs(96, 96), tmp_path)
    target = Target("layer.a", 96, 8, WeightScheme(4, 32))
    (solved,) = solve_modules(stats, {"a": weight(8, 96)}, {"a": target}, BEST, shift=kept.take)
    assert solved[1].row.fallback == "all calibration inputs are zero"
    assert kept.take() is None
