"""Descent over groups: it never rises, and stops where nothing is left to gain."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.quant import gptq, refine, rtn
from qinfer.schemes import WeightScheme


def problem(in_features: int, out_features: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and a damped Hessian of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(out_features, in_features, generator=generator)
    X = torch.randn(4 * in_features, in_features, generator=generator)
    X = X @ torch.randn(in_features, in_features, generator=generator)
    H = X.T @ X / len(X)
    return W, H + 0.01 * H.diagonal().mean() * torch.eye(in_features)


def losses(columns: gptq.Columns, W: torch.Tensor, H: torch.Tensor, size: int) -> torch.Tensor:
    error = W.T.double() - columns.dense(size).double()
    return (error * (H.double() @ error)).sum(0)  # [out]


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    size=st.sampled_from([None, 7, 16, 48]),
    symmetric=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_the_error_of_no_row_rises(bits: int, size: int | None, symmetric: bool, seed: int) -> None:
    W, H = problem(48, 5, seed)
    scheme = WeightScheme(bits, size, symmetric=symmetric, act_order=True)
    factor = gptq.factorize(H, damp_percent=0.0, act_order=True)
    columns = gptq.solve_columns(W, factor, scheme)
    low, high = rtn.code_range(bits)
    for _ in range(3):
        before = losses(columns, W, H, size or 48)
        columns = refine.descend(columns, W.T.contiguous(), H, scheme, passes=1)
        after = losses(columns, W, H, size or 48)
        assert bool((after <= before * (1 + 1e-4)).all())
    weight = columns.weight(scheme)
    assert torch.equal(columns.scale, columns.scale.half().float())
    assert bool((columns.scale > 0).all())
    zero = torch.zeros(1) if columns.zero is None else gptq.spread(columns.zero, size or 48, 48)
    codes = columns.levels + zero
    assert bool(((codes >= low) & (codes <= high) & (codes == codes.round())).all())
    assert torch.equal(weight.dequantize(), columns.dense(size or 48).T)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_lowers_the_error_that_gptq_leaves(bits: int) -> None:
    W, H = problem(128, 32, seed=0)
    scheme = WeightScheme(bits, 32, act_order=True)
    factor = gptq.factorize(H, damp_percent=0.0, act_order=True)
    columns = gptq.solve_columns(W, factor, scheme)
    better = refine.descend(columns, W.T.contiguous(), H, scheme, passes=2)
    assert float(losses(better, W, H, 32).sum()) < 0.9 * float(losses(columns, W, H, 32).sum())


def test_the_input_is_left_as_it_was() -> None:
    W, H = problem(32, 8, seed=0)
    scheme = WeightScheme(3, 16)
    columns = gptq.solve_columns(W, gptq.factorize(H), scheme)
    levels, scale = columns.levels.clone(), columns.scale.clone()
    refine.descend(columns, W.T.contiguous(), H, scheme, passes=2)
    assert torch.equal(columns.levels, levels)
    assert torch.equal(columns.scale, scale)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_weight_on_the_grid_is_found_exactly(symmetric: bool) -> None:
    """From wrong levels, with the right scale, in one pass over a diagonal Hessian."""
    scheme = WeightScheme(4, 8, symmetric=symmetric)
    generator = torch.Generator().manual_seed(0)
    right = gptq.Columns(
        torch.randint(-7, 8, (16, 6), generator=generator).float(),
        torch.tensor([[0.5], [0.25]]).expand(2, 6).contiguous(),
        None if symmetric else torch.zeros(2, 6),
    )
    wrong = gptq.Columns(torch.zeros(16, 6), right.scale, right.zero)
    H = torch.diag(torch.rand(16, generator=generator) + 0.5)
    found = refine.descend(wrong, right.dense(8), H, scheme, passes=1)
    assert torch.equal(found.dense(8), right.dense(8))


def test_close_to_the_best_of_all_levels() -> None:
    """Two bits, five inputs: every assignment of levels can be tried, each with its best scale."""
    size, found, best, start = 5, 0.0, 0.0, 0.0
    every = torch.tensor(list(itertools.product(range(-2, 2), repeat=size))).double().T
    for seed in range(20):
        W, H = problem(size, 1, seed)
        scheme = WeightScheme(2, None)
        columns = gptq.solve_columns(W, gptq.factorize(H, damp_percent=0.0), scheme)
        refined = refine.descend(columns, W.T.contiguous(), H, scheme, passes=4)
        start += float(losses(columns, W, H, size))
        found += float(losses(refined, W, H, size))
        scale = (every * (H.double() @ W.T.double())).sum(0)
        scale = (scale / (every * (H.double() @ every)).sum(0)).nan_to_num(0.0).clamp(min=0.0)
        error = W.T.double() - every * scale
        best += float((error * (H.double() @ error)).sum(0).min())
    assert best <= found < start
    assert found < best + 0.5 * (start - best)
