"""From statistics to the quantized weights of a group of linears."""

import torch

from qinfer.quant import rtn
from qinfer.quant.hessian import InputStatistics
from qinfer.quant.solver import SolverOptions, solve_modules
from qinfer.quant.targets import Target
from qinfer.schemes import WeightScheme


def test_solves_what_shares_an_input_in_order() -> None:
    generator = torch.Generator().manual_seed(0)
    stats = InputStatistics(96, name="layer")
    X = torch.randn(300, 96, generator=generator) @ torch.randn(96, 96, generator=generator)
    stats.add(X, sample=0)
    weights = {
        "b": torch.randn(24, 96, generator=generator),
        "a": torch.randn(16, 96, generator=generator),
    }
    schemes = {"b": WeightScheme(4, 32), "a": WeightScheme(3, 48, symmetric=False)}
    targets = {
        name: Target(f"layer.{name}", 96, weights[name].shape[0], schemes[name]) for name in weights
    }
    solved = dict(solve_modules(stats, weights, targets, SolverOptions()))
    assert list(solved) == ["b", "a"]
    for name, result in solved.items():
        assert result.weight.scheme == schemes[name]
        assert result.row.name == f"layer.{name}"
        assert result.row.num_tokens == 300
        assert result.row.error is not None
        rounded = rtn.quantize(weights[name], schemes[name]).dequantize()
        lost = float(((rounded - weights[name]) @ X.T).square().sum())
        assert result.row.error < 0.8 * lost / float((weights[name] @ X.T).square().sum())
