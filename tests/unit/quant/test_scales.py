"""Scales by search: against their own objective, written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.errors import NonFiniteError
from qinfer.quant import gptq, rtn, scales
from qinfer.schemes import WeightScheme


def correlated(in_features: int, seed: int = 0) -> torch.Tensor:
    """Return a Hessian."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(4 * in_features, in_features, generator=generator)
    X = X @ torch.randn(in_features, in_features, generator=generator)
    return X.T @ X / len(X)


def rounded(weight: torch.Tensor, grid: rtn.Grid, size: int) -> torch.Tensor:
    groups = torch.arange(weight.shape[1]) // size
    each = rtn.Grid(grid.scale[:, groups], grid.zero[:, groups], grid.bits)
    return each.decode(each.encode(weight))


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    size=st.sampled_from([5, 16, 40]),
    symmetric=st.booleans(),
    search=st.sampled_from(["mse", "hessian"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_never_loses_more_than_the_whole_range(
    bits: int, size: int, symmetric: bool, search: str, seed: int
) -> None:
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(seed)) ** 3
    scheme = WeightScheme(bits, size, symmetric=symmetric)
    factor = gptq.factorize(correlated(40, seed))
    loss_of = scales.squared if search == "mse" else scales.hessian_loss(factor.columns)
    grid = scales.search_groups(weight, scheme, loss_of, name="weight")
    whole = rtn.fit_groups(weight, scheme, name="weight")
    assert torch.equal(grid.scale, grid.scale.half().float())
    assert bool((grid.scale <= whole.scale).all())
    for start in range(0, 40, size):
        part = slice(start, start + size)
        loss = loss_of(start, min(start + size, 40))
        found = loss((rounded(weight, grid, size) - weight)[:, part])
        covered = loss((rounded(weight, whole, size) - weight)[:, part])
        assert bool((found <= covered * (1 + 1e-5)).all())


def test_outliers_are_clipped_for_the_rest() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    scheme = WeightScheme(3, 64)
    grid = scales.search_groups(weight, scheme, scales.squared, name="weight")
    lost = (rounded(weight, grid, 64) - weight).square().sum()
    whole = rtn.fit_groups(weight, scheme, name="weight")
    assert float(lost) < 0.8 * float((rounded(weight, whole, 64) - weight).square().sum())


@pytest.mark.parametrize("act_order", [True, False])
def test_hessian_loss_is_what_the_other_inputs_cannot_make_up_for(act_order: bool) -> None:
    """Against the minimum over the errors of the others, solved for explicitly."""
    H = correlated(24)
    factor = gptq.factorize(H, damp_percent=0.01, act_order=act_order)
    damped = (H + 0.01 * H.diagonal().mean() * torch.eye(24)).double()
    errors = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    inside, outside = list(range(8, 16)), [*range(8), *range(16, 24)]
    found = scales.hessian_loss(factor.columns)(8, 16)(errors)
    for row, error in enumerate(errors.double()):
        pull = damped[outside][:, inside] @ error
        made_up = torch.linalg.solve(damped[outside][:, outside], -pull)
        whole = torch.zeros(24, dtype=torch.float64)
        whole[inside], whole[outside] = error, made_up
        assert float(found[row]) == pytest.approx(float(whole @ damped @ whole), rel=1e-4)


def test_zeros_stay_zero_g07() -> None:
    weight = torch.zeros(3, 32)
    weight[1] = 1e-30
    for symmetric in (True, False):
        scheme = WeightScheme(4, 16, symmetric=symmetric)
        grid = scales.search_groups(weight, scheme, scales.squared, name="weight")
        assert bool((rounded(weight, grid, 16) == 0).all())


def test_non_finite_weight_is_named_g05() -> None:
    weight = torch.ones(3, 32)
    weight[2, 20] = float("nan")
    with pytest.raises(NonFiniteError, match=r"layers\.4\.up_proj"):
        scales.search_groups(
            weight, WeightScheme(4, 16), scales.squared, name="model.layers.4.up_proj"
        )
