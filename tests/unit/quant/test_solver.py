"""From statistics to the quantized weights of a group of linears."""

import subprocess
import sys
from copy import deepcopy

import pytest
import torch

from qinfer.errors import NonFiniteError, QuantizationError
from qinfer.quant import gptq, rtn, solver
from qinfer.quant.hessian import InputStatistics
from qinfer.quant.solver import Solved, SolverOptions, solve_modules
from qinfer.quant.targets import Target
from qinfer.schemes import WeightScheme

PLAIN = SolverOptions(scale_search="absmax", passes=0)
BEST = SolverOptions(scale_search="hessian", passes=2)


def inputs(in_features: int = 96, tokens: int = 300, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(in_features, in_features, generator=generator)
    return torch.randn(tokens, in_features, generator=generator) @ mixing


def gathered(X: torch.Tensor) -> InputStatistics:
    stats = InputStatistics(X.shape[1], name="layer")
    stats.add(X, sample=0)
    return stats


def weight(rows: int, in_features: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, in_features, generator=torch.Generator().manual_seed(seed))


def solve_one(
    W: torch.Tensor, stats: InputStatistics, scheme: WeightScheme, options: SolverOptions
) -> Solved:
    target = Target("layer.a", W.shape[1], W.shape[0], scheme)
    return dict(solve_modules(deepcopy(stats), {"a": W}, {"a": target}, options))["a"]


@pytest.mark.parametrize("options", [PLAIN, BEST])
def test_solves_what_shares_an_input_in_order(options: SolverOptions) -> None:
    X = inputs()
    weights = {"b": weight(24, seed=1), "a": weight(16, seed=2)}
    schemes = {"b": WeightScheme(4, 32), "a": WeightScheme(3, 48, symmetric=False)}
    targets = {
        name: Target(f"layer.{name}", 96, weights[name].shape[0], schemes[name]) for name in weights
    }
    solved = dict(solve_modules(gathered(X), weights, targets, options))
    assert list(solved) == ["b", "a"]
    for name, result in solved.items():
        assert result.weight.scheme == schemes[name]
        assert result.row.name == f"layer.{name}"
        assert result.row.num_tokens == 300
        assert result.row.error is not None
        rounded = rtn.quantize(weights[name], schemes[name]).dequantize()
        truth = float((weights[name] @ X.T).square().sum())
        lost = float(((rounded - weights[name]) @ X.T).square().sum())
        assert result.row.error < 0.8 * lost / truth
        lost = float(((result.weight.dequantize() - weights[name]) @ X.T).square().sum())
        assert result.row.error == pytest.approx(lost / truth, rel=1e-3)


@pytest.mark.parametrize("group", [None, 32, 64, 96, 40])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_passes_lower_the_error(group: int | None, bits: int, symmetric: bool) -> None:
    W, stats = weight(32), gathered(inputs())
    scheme = WeightScheme(bits, group, symmetric=symmetric, act_order=True)
    steps = [
        PLAIN,
        SolverOptions(scale_search="hessian", passes=0),
        SolverOptions(scale_search="hessian", passes=1),
        SolverOptions(scale_search="hessian", passes=3),
    ]
    errors = [solve_one(W, stats, scheme, options).row.error or 0.0 for options in steps]
    assert errors[1] > errors[2] > errors[3]
    assert errors[3] < 0.98 * errors[0]


@pytest.mark.parametrize(("bits", "options"), [(4, PLAIN), (8, PLAIN), (8, BEST)])
def test_without_search_and_passes_it_is_plain_gptq(bits: int, options: SolverOptions) -> None:
    W, stats = weight(16), gathered(inputs())
    scheme = WeightScheme(bits, 32, act_order=True)
    plain = gptq.solve(W, deepcopy(stats).matrix(), scheme)
    result = solve_one(W, stats, scheme, options)
    assert torch.equal(result.weight.codes, plain.weight.codes)
    assert torch.equal(result.weight.scales, plain.weight.scales)
    assert result.row.error == plain.error


def test_modules_and_pieces_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = WeightScheme(4, 32, act_order=True)
    weights = {"a": weight(16, seed=1), "b": 3 * weight(24, seed=2)}
    targets = {name: Target(name, 96, len(W), scheme) for name, W in weights.items()}
    stats = gathered(inputs())
    monkeypatch.setattr(solver, "_PIECE_ELEMENTS", 96 * 10)  # 10 rows at a time
    for name, result in solve_modules(deepcopy(stats), weights, targets, BEST):
        alone = solve_one(weights[name], stats, scheme, BEST)
        # The number of rows may decide a tie, so not every code has to be the same.
        rows = (result.weight.dequantize() - alone.weight.dequantize()).abs().amax(1)
        assert int((rows < 1e-6).sum()) >= len(rows) - 1


def test_equal_bytes_whatever_the_threads() -> None:
    stats = gathered(inputs(256, 600))
    W, scheme = weight(64, 256), WeightScheme(4, 64, act_order=True)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(solve_one(W, stats, scheme, BEST))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0].weight.codes, results[1].weight.codes)
    assert torch.equal(results[0].weight.scales, results[1].weight.scales)
    assert results[0].row == results[1].row


@pytest.mark.parametrize("options", [PLAIN, BEST])
def test_rounds_with_the_reason_where_no_damping_works_g02(options: SolverOptions) -> None:
    W, scheme = weight(8), WeightScheme(4, 32)
    silent = solve_one(W, gathered(torch.zeros(20, 96)), scheme, options)
    assert silent.row.fallback == "all calibration inputs are zero"
    assert silent.row.damp_percent is None
    assert torch.equal(silent.weight.codes, rtn.quantize(W, scheme).codes)


def test_dead_inputs_keep_their_rounded_value_g03() -> None:
    X, W = inputs(), weight(16)
    X[:, 7] = 0.0
    result = solve_one(W, gathered(X), WeightScheme(4, 32, act_order=True), BEST).weight
    scale = result.scales[:, 0].float()
    inside = W[:, 7].abs() < 7 * scale
    assert bool(((result.dequantize()[:, 7] - W[:, 7]).abs() <= 0.5001 * scale)[inside].all())
    assert int(inside.sum()) > 8


def test_zeros_stay_zero_g07() -> None:
    W = weight(4)
    W[0], W[1, :32], W[2] = 0.0, 0.0, 1e-30
    dense = solve_one(W, gathered(inputs()), WeightScheme(4, 32), BEST).weight.dequantize()
    assert bool((dense[0] == 0).all())
    assert bool((dense[2] == 0).all())
    assert bool(torch.isfinite(dense).all())


@pytest.mark.parametrize("options", [PLAIN, BEST])
def test_what_cannot_be_solved_is_named_g05(options: SolverOptions) -> None:
    stats = gathered(inputs())
    for value, error in ((float("inf"), NonFiniteError), (1e7, QuantizationError)):
        W = weight(4)
        W[1, 50] = value
        with pytest.raises(error, match=r"layer\.a"):
            solve_one(W, stats, WeightScheme(4, 32), options)


PEAK = """
import sys
from pathlib import Path

import torch

from qinfer.quant.hessian import InputStatistics
from qinfer.quant.solver import SolverOptions, solve_modules
from qinfer.quant.targets import Target
from qinfer.schemes import WeightScheme

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def solve(width):
    stats = InputStatistics(width, name="layer")
    stats.add(torch.randn(64, width), sample=0)
    target = Target("layer", width, 32, WeightScheme(4, 64, act_order=True))
    return dict(solve_modules(stats, {"a": torch.randn(32, width)}, {"a": target}, SolverOptions()))

torch.set_num_threads(1)
solve(256)
before, width = status("VmRSS"), 3072
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
solve(width)
print((status("VmHWM") - before) / width**2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_the_peak_is_sixteen_bytes_per_entry_of_the_hessian() -> None:
    """Its float32 sums, one float64 matrix and the float32 factor; the rest is small tensors."""
    command = [sys.executable, "-c", PEAK]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 12 < float(result.stdout) < 16 + 5
