"""GPTQ against a literal textbook loop, against rounding, and in the corners."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.quant import gptq, rtn
from qinfer.schemes import WeightScheme


def problem(
    in_features: int = 128, out_features: int = 48, tokens: int = 512, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight, correlated inputs and their Hessian."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(out_features, in_features, generator=generator)
    mixing = torch.randn(in_features, in_features, generator=generator) / in_features**0.5
    X = torch.randn(tokens, in_features, generator=generator) @ (mixing + torch.eye(in_features))
    return W, X, 2 / tokens * X.T @ X


def damped(H: torch.Tensor, share: float) -> torch.Tensor:
    return H.double() + share * H.diagonal().double().mean() * torch.eye(len(H))


def textbook(
    W: torch.Tensor, H: torch.Tensor, scheme: WeightScheme, damp_percent: float
) -> torch.Tensor:
    """Optimal brain quantization, column after column, the inverse Hessian updated explicitly.

    arXiv 2210.17323, equations 2 and 3, without Cholesky and without blocks, in float64.
    """
    W, H = W.double().clone(), H.double()
    size = scheme.group_size or W.shape[1]
    original = W.clone()
    inverse = torch.linalg.inv(
        H + damp_percent * H.diagonal().mean() * torch.eye(len(H), dtype=torch.float64)
    )
    order = list(range(len(H)))
    if scheme.act_order:
        order = torch.argsort(H.diagonal(), descending=True, stable=True).tolist()
    result = torch.zeros_like(W)
    grids: dict[int, rtn.Grid] = {}
    for column in order:
        group = column // size
        if group not in grids:
            source = original if scheme.act_order else W
            members = source[:, group * size : (group + 1) * size].float()
            grids[group] = rtn.fit_grid(members, scheme, name="weight")
        grid = grids[group]
        result[:, column] = grid.decode(grid.encode(W[:, column].float()))
        error = (W[:, column] - result[:, column]) / inverse[column, column]
        W -= error[:, None] * inverse[column][None]
        inverse = (
            inverse - torch.outer(inverse[:, column], inverse[column]) / (inverse[column, column])
        )
        # The quantized column is out of the problem.
        inverse[column], inverse[:, column] = 0.0, 0.0
    return result


@pytest.mark.parametrize("group", [16, 32, 48, None])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("block_size", [32, 128])
def test_matches_the_textbook(
    group: int | None, symmetric: bool, act_order: bool, block_size: int
) -> None:
    W, _, H = problem(96, 16)
    scheme = WeightScheme(4, group, symmetric=symmetric, act_order=act_order)
    result = gptq.solve(W, H, scheme, damp_percent=0.01, block_size=block_size)
    expected = textbook(W, H, scheme, 0.01)
    # A value halfway between two codes may fall either way, and then moves its row.
    rows = (result.weight.dequantize().double() - expected).abs().amax(1)
    assert int((rows < 1e-5).sum()) >= 15
    assert result.fallback is None


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("group", [32, 64, None])
def test_beats_rounding_by_a_margin_g14(bits: int, group: int | None) -> None:
    W, X, H = problem()
    scheme = WeightScheme(bits, group)
    result = gptq.solve(W, H, scheme)
    rounded = rtn.quantize(W, scheme).dequantize()
    truth = W @ X.T
    error = float(
        ((result.weight.dequantize() @ X.T) - truth).square().sum() / truth.square().sum()
    )
    plain = float(((rounded @ X.T) - truth).square().sum() / truth.square().sum())
    assert error < 0.6 * plain
    assert result.error == pytest.approx(error, rel=1e-3)


def test_rank_deficient_hessian_g01() -> None:
    W, _, H = problem(128, 48, tokens=12)
    undamped = gptq.factorize(H, damp_percent=0.0)
    assert undamped.attempts > 1
    assert undamped.damp_percent == 0.01
    result = gptq.solve(W, H, WeightScheme(4, 32), damp_percent=1e-9)
    assert result.fallback is None
    assert result.damp_percent is not None
    assert result.damp_percent <= 0.01


def test_falls_back_to_rounding_with_a_reason_g02() -> None:
    W, _, H = problem()
    scheme = WeightScheme(4, 32)
    indefinite = H.clone()
    indefinite[0, 1] = indefinite[1, 0] = 1e4
    result = gptq.solve(W, indefinite, scheme)
    assert result.fallback is not None
    assert "not positive definite at damping 0.01, 0.1, 1" in result.fallback
    assert result.damp_percent is None
    assert result.attempts == 3
    assert torch.equal(result.weight.codes, rtn.quantize(W, scheme).codes)
    silent = gptq.solve(W, torch.zeros(128, 128), scheme)
    assert silent.fallback == "all calibration inputs are zero"
    assert silent.error == 0.0


@pytest.mark.parametrize("act_order", [True, False])
def test_dead_column_keeps_its_rounded_value_g03(act_order: bool) -> None:
    W, X, _ = problem()
    X[:, 7] = 0.0
    H = 2 / len(X) * X.T @ X
    scheme = WeightScheme(4, 32, act_order=act_order)
    result = gptq.solve(W, H, scheme)
    dense = result.weight.dequantize()
    scale = result.weight.scales[:, 0].float()
    assert bool(((dense[:, 7] - W[:, 7]).abs() <= scale).all())
    # The other columns come out as if the dead one were not there to correct.
    alive = [column for column in range(128) if column != 7]
    rounded = rtn.quantize(W, scheme).dequantize()
    lost = float(((dense - W)[:, alive] @ X[:, alive].T).square().sum())
    assert lost < 0.6 * float(((rounded - W)[:, alive] @ X[:, alive].T).square().sum())


def test_one_group_per_row_at_any_width_g12() -> None:
    W, _, H = problem(200, 64)
    result = gptq.solve(W, H, WeightScheme(4, None), block_size=128)
    assert result.weight.scales.shape == (64, 1)
    expected = (2 * W.abs().amax(1) / 15).half()
    assert torch.equal(result.weight.scales[:, 0], expected)
    assert bool(result.weight.dequantize().abs().sum(0).all())


def test_act_order_needs_no_group_index_g13() -> None:
    W, X, _ = problem(128, 32)
    X = X * torch.linspace(0.1, 3.0, 128)  # ascending energy: the order is reversed
    H = 2 / len(X) * X.T @ X
    scheme = WeightScheme(4, 32, act_order=True)
    result = gptq.solve(W, H, scheme)
    static = rtn.fit_groups(W, scheme, name="weight")
    assert result.weight.group_index is None
    assert torch.equal(result.weight.scales.float(), static.scale)
    assert result.error < gptq.solve(W, H, WeightScheme(4, 32)).error * 1.1
    assert result.error < 0.6 * gptq.relative_error(W, W - rtn.quantize(W, scheme).dequantize(), H)


def test_equal_bytes_whatever_the_threads() -> None:
    W, _, H = problem(256, 64)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(gptq.solve(W, H, WeightScheme(4, 64)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0].weight.codes, results[1].weight.codes)
    assert torch.equal(results[0].weight.scales, results[1].weight.scales)
    assert results[0].error == results[1].error


@given(
    in_features=st.integers(1, 70),
    group=st.one_of(st.none(), st.integers(1, 40)),
    block_size=st.integers(1, 50),
)
@settings(max_examples=60, deadline=None)
def test_blocks_tile_the_columns_and_respect_groups(
    in_features: int, group: int | None, block_size: int
) -> None:
    size = group or in_features
    blocks = list(gptq._blocks(in_features, size, block_size))
    assert [column for start, end in blocks for column in range(start, end)] == list(
        range(in_features)
    )
    for start, end in blocks:
        assert end - start <= block_size
        assert start // size == (end - 1) // size


@pytest.mark.parametrize("symmetric", [True, False])
def test_squared_errors_add_up_to_the_loss(symmetric: bool) -> None:
    """arXiv 2210.17323, section 3.2: each column's error over its pivot, squared."""
    W, _, H = problem(40, 12)
    factor = gptq.factorize(H, damp_percent=0.01)
    assert factor.U is not None
    grid = rtn.fit_groups(W, WeightScheme(3, None, symmetric=symmetric), name="weight")
    scale, zero = grid.scale.T.expand(40, -1), grid.zero.T.expand(40, -1)
    columns = W.T.contiguous()
    levels, errors = gptq.round_columns(
        columns.clone(), factor.U, scale, None if symmetric else zero, 3
    )
    lost = (columns - levels * scale).double()
    loss = (lost * (damped(H, 0.01) @ lost)).sum(0)
    assert torch.allclose(errors.double().square().sum(0), loss, rtol=1e-4)


def test_columns_are_the_weight() -> None:
    W, _, H = problem(70, 12)
    for scheme in (WeightScheme(4, 32), WeightScheme(4, 32, symmetric=False, act_order=True)):
        factor = gptq.factorize(H, act_order=scheme.act_order)
        columns = gptq.solve_columns(W, factor, scheme)
        assert torch.equal(columns.weight(scheme).dequantize(), columns.dense(32).T)


@pytest.mark.parametrize("act_order", [True, False])
def test_a_given_grid_is_kept(act_order: bool) -> None:
    W, _, H = problem(96, 12)
    scheme = WeightScheme(4, 32, act_order=act_order)
    grid = rtn.fit_groups(0.8 * W, scheme, name="weight")
    columns = gptq.solve_columns(W, gptq.factorize(H, act_order=act_order), scheme, grid=grid)
    assert torch.equal(columns.scale, grid.scale.T)


@pytest.mark.parametrize("act_order", [True, False])
def test_natural_order_of_the_factor(act_order: bool) -> None:
    _, _, H = problem(48, 1)
    U = gptq.factorize(H, act_order=act_order).columns(0, 48).double()
    assert torch.allclose(U.T @ U @ damped(H, 0.01), torch.eye(48).double(), atol=1e-4)


def test_damping_is_taken_back_whatever_happens() -> None:
    _, _, H = problem(48, 1)
    H[5], H[:, 5] = 0.0, 0.0  # an input that no token used
    before = H.clone()
    mean = before.diagonal().sum() / 47
    expected = before + 0.1 * mean * torch.eye(48)
    expected[5, 5] += 1.0

    def fail() -> None:
        with gptq.damped(H, 0.1):
            assert torch.allclose(H, expected, rtol=1e-6)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(H, before)
    gptq.factorize(H)
    assert torch.equal(H, before)


@pytest.mark.parametrize("size", [1, 127, 129, 300])
@pytest.mark.parametrize("reorder", [True, False])
def test_the_factor_is_the_inverse_of_any_size(size: int, reorder: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    X = torch.randn(2 * size + 5, size, generator=generator)
    H = (X.T @ X / len(X)).double()
    H = ((H + H.T) / 2).float()
    order = torch.randperm(size, generator=generator) if reorder else torch.arange(size)
    U = gptq.inverse_factor(H, order if reorder else None)
    assert U is not None
    assert torch.equal(U, U.triu())
    expected = torch.linalg.inv(H.double())[order][:, order]
    assert torch.allclose(U.double().T @ U.double(), expected, rtol=1e-4, atol=1e-4)
