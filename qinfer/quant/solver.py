"""From the statistics of an input to the quantized weights of the linears that read it.

Owns the choice of solver steps and what is reported of them. It knows nothing of decoder blocks,
samples or files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from qinfer.formats.weight import QuantizedWeight
from qinfer.quant import gptq, rtn
from qinfer.quant.hessian import InputStatistics
from qinfer.quant.report import ModuleRow
from qinfer.quant.targets import Target
from qinfer.schemes import WeightScheme


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverOptions:
    """How weights are solved.

    Args:
        damp_percent: share of the mean Hessian diagonal that is added to the diagonal.
        scale_search: how the scales of groups are found: `absmax`, `mse` or `hessian`.
        gptaq: correct for what quantizing the layers before did to the input; the statistics must
            be paired.
    """

    damp_percent: float = gptq.DEFAULT_DAMP_PERCENT
    scale_search: str = "absmax"
    gptaq: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """A module's quantized weight and its line in the report."""

    weight: QuantizedWeight
    row: ModuleRow


def solve_modules(
    stats: InputStatistics,
    weights: Mapping[str, torch.Tensor],
    targets: Mapping[str, Target],
    options: SolverOptions,
) -> Iterator[tuple[str, Solved]]:
    """Quantize the linears that share an input; its Hessian is factored once.

    Args:
        stats: of the input, complete.
        weights: `[out, in]`, any float dtype, by name.
        targets: the linears to solve, by the same names; every one has a scheme.
        options: how.

    Yields:
        Name and result, in the order of `targets`.

    Raises:
        QuantizationError: no calibration token, or a scale exceeds float16.
        NonFiniteError: the statistics or a weight are not finite.
    """
    matrix = stats.matrix()
    act_order = any(_scheme(target).act_order for target in targets.values())
    factor = gptq.factorize(matrix, damp_percent=options.damp_percent, act_order=act_order)
    for name, target in targets.items():
        result = gptq.solve_factored(
            weights[name], matrix, _scheme(target), factor, name=target.name
        )
        row = replace(
            plain_row(target),
            error=result.error,
            damp_percent=result.damp_percent,
            attempts=result.attempts,
            num_tokens=stats.num_tokens,
            fallback=result.fallback,
        )
        yield name, Solved(result.weight, row)


def round_to_nearest(target: Target, weight: torch.Tensor) -> Solved:
    """Quantize one weight without calibration; its error is that of the weight itself."""
    quantized = rtn.quantize(weight, _scheme(target), name=target.name)
    dense = weight.float()
    total = float(dense.square().sum(dtype=torch.float64))
    lost = float((dense - quantized.dequantize()).square().sum(dtype=torch.float64))
    return Solved(quantized, replace(plain_row(target), error=lost / total if total > 0 else 0.0))


def plain_row(target: Target) -> ModuleRow:
    """Return a module's line without results: it is left as it is, or only planned."""
    return ModuleRow(
        target.name,
        target.in_features,
        target.out_features,
        None if target.scheme is None else str(target.scheme),
        skipped=target.reason,
    )


def _scheme(target: Target) -> WeightScheme:
    if target.scheme is None:
        raise ValueError(f"{target.name} is not to be quantized")
    return target.scheme
