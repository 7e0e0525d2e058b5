"""The C++ linear op on bf16 weights with activations rounded to bf16, where the machine has it."""

import pytest
import torch

from qinfer.errors import ConfigError, QinferError
from qinfer.kernels.cpu import tiled, tiling
from qinfer.kernels.cpu.program import OpKind, Program

ROWS = (1, 2, 5, 8, 32, 33, 48, 257)
THREADS = (1, 2, 3, 1, 2, 2, 3, 3)  # of 32 and of 48 rows each thread takes an equal part
SHAPES = ((48, 128), (50, 40), (7, 36), (16, 352))


def activations(rows, columns, *, seed=1):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def assert_near(actual, expected, tolerance=1e-5):
    """Compare to the scale of each row, as sums of many terms may cancel."""
    size = expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert ((actual - expected).abs() / size).max() <= tolerance


def rounded(x):
    """Return bfloat16 values as vdpbf16ps reads them, in float64: denormals are zero."""
    x = x.bfloat16().double()
    return torch.where(x.abs() < 2.0**-126, 0.0, x)


@pytest.fixture
def bf16_pairs():
    """Run a test only where the machine multiplies pairs of bfloat16."""
    if not OpKind.LINEAR_BF16.available:
        pytest.skip("this machine or build multiplies no pairs of bfloat16")


@pytest.mark.usefixtures("bf16_pairs")
@pytest.mark.parametrize("shape", [*SHAPES, (33, 1000)], ids=str)
def test_bf16_activations_match_rounded_ones_for_any_number_of_rows(shape):
    weight = (activations(shape[0], shape[1], seed=2) * 0.1).bfloat16()
    tiles, x = tiling.tile(weight), activations(max(ROWS), shape[1])
    bias = torch.linspace(-1, 1, shape[0])
    whole = tiled.run_linear(tiles, x, activations="bf16", bias=bias)
    assert_near(whole, (rounded(x) @ rounded(weight).T + bias.double()).float())
    for rows, threads in zip(ROWS, THREADS, strict=True):
        part = tiled.run_linear(tiles, x[:rows], activations="bf16", bias=bias, threads=threads)
        assert torch.equal(part, whole[:rows])
    for start, stop in ((3, 4), (5, 12), (9, 26), (31, 40)):
        part = tiled.run_linear(tiles, x[start:stop], activations="bf16", bias=bias)
        assert torch.equal(part, whole[start:stop])


@pytest.mark.usefixtures("bf16_pairs")
def test_bf16_activations_round_to_nearest_even_and_lose_denormals():
    halves = 1 + torch.arange(16) / 256  # every second lies between two bfloat16
    x = torch.cat([halves, -halves, torch.tensor([1e-40, 2.0**-126, 3.0e38, 0.0])])
    tiles = tiling.tile(torch.eye(36, dtype=torch.bfloat16))
    out = tiled.run_linear(tiles, x[None], activations="bf16")[0]
    assert torch.equal(out, rounded(x).float())
    broken = torch.ones(3, 36)
    broken[0, 7], broken[2, 35] = torch.nan, torch.inf
    out = tiled.run_linear(tiles, broken, activations="bf16")
    assert out[0].isnan().all()
    assert (out[1] == 1).all()
    assert not out[2].isfinite().any()


@pytest.mark.usefixtures("bf16_pairs")
def test_a_dead_row_of_bf16_activations_gives_the_bias_and_the_residual_may_be_the_output():
    tiles = tiling.tile((activations(50, 96) * 0.1).bfloat16())
    x, hidden = activations(11, 96), activations(11, 50, seed=3)
    x[4] = 0
    plain = tiled.run_linear(tiles, x, activations="bf16")
    assert not plain[4].any()
    expected = plain + hidden
    program, num_tokens = Program(), torch.tensor([11])
    rows = tiled.RoundedRows(x)
    tiled.add_linear(program, tiles, rows, hidden, num_tokens, residual=hidden)
    program.run(2)
    assert torch.equal(hidden, expected)
    num_tokens.zero_()
    program.run(2)
    assert torch.equal(hidden, expected)


def test_bf16_activations_are_refused_where_they_do_not_fit(isa):
    num_tokens, out = torch.tensor([2]), torch.zeros(2, 16)
    rows = tiled.RoundedRows(torch.zeros(2, 64))
    with pytest.raises(ConfigError, match="meet bfloat16 weights, not FP32"):
        tiled.linear_args(tiling.tile(torch.zeros(16, 64)), rows, out, num_tokens)
    tiles = tiling.tile(torch.zeros(16, 64, dtype=torch.bfloat16))
    if not OpKind.LINEAR_BF16.available:
        with pytest.raises(QinferError):
            tiled.run_linear(tiles, torch.zeros(2, 64), activations="bf16")
        return
    assert isa == "avx512"
    for changes in ({"float_rows": None}, {"permutation": out.data_ptr()}):
        args = tiled.linear_args(tiles, rows, out, num_tokens)
        for name, value in changes.items():
            setattr(args, name, value)
        program = Program()
        program.add(OpKind.LINEAR_BF16, args)
        with pytest.raises(QinferError):
            program.run(1)
