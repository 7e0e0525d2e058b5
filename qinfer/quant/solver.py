"""From the statistics of an input to the quantized weights of the linears that read it.

Owns the choice of solver steps and what is reported of them. It knows nothing of decoder blocks,
samples or files.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial

import torch

from qinfer.formats.weight import QuantizedWeight, concat_out
from qinfer.quant import gptq, refine, rtn, scales
from qinfer.quant.hessian import InputStatistics
from qinfer.quant.report import ModuleRow
from qinfer.quant.targets import Target
from qinfer.schemes import WeightScheme

_FINE_BITS = 8  # so many that clipping never pays and rounding hardly matters
_PIECE_ELEMENTS = 1 << 21  # of a weight solved at a time: 8 MiB, several times over
_WORTH_ELEMENTS = 1 << 19  # below, the steps of a second thread cost as much as they save


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverOptions:
    """How weights are solved. At 8 bits scales are not searched and passes not made.

    Args:
        damp_percent: share of the mean Hessian diagonal that is added to the diagonal.
        scale_search: how the scales of groups are found (see `scales`): `absmax` covers the range,
            `mse` has the least error of the weights, `hessian` that of the outputs.
        passes: over the groups after GPTQ (see `refine`); 0 = none.
        gptaq: aim at the outputs of the unquantized model, so that each linear makes up for what
            was lost before it; the statistics must be paired.
    """

    damp_percent: float = gptq.DEFAULT_DAMP_PERCENT
    scale_search: str = "hessian"
    passes: int = 2
    gptaq: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """A module's quantized weight and its line in the report."""

    weight: QuantizedWeight
    row: ModuleRow


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """What the linears that share an input have in common.

    Args:
        H: float32 `[in, in]`, not damped.
        factor: of the damped one.
        damped: float32 `[in, in]`, the damped one; None where there is no factor.
        shift: `[in, in]`, what GPTAQ adds to a weight: `W @ shift`; None = nothing.
        options: how to solve.
    """

    H: torch.Tensor
    factor: gptq.Factor
    damped: torch.Tensor | None
    shift: torch.Tensor | None
    options: SolverOptions


def solve_modules(
    stats: InputStatistics,
    weights: Mapping[str, torch.Tensor],
    targets: Mapping[str, Target],
    options: SolverOptions,
    *,
    executor: Executor | None = None,
) -> Iterator[tuple[str, Solved]]:
    """Quantize the linears that share an input; its Hessian is factored once.

    Args:
        stats: of the input, complete.
        weights: `[out, in]`, any float dtype, by name.
        targets: the linears to solve, by the same names; every one has a scheme.
        options: how.
        executor: where pieces of weights are solved, each by one thread; None = here.

    Yields:
        Name and result, in the order of `targets`.

    Raises:
        QuantizationError: no calibration token, or a scale exceeds float16.
        NonFiniteError: the statistics or a weight are not finite.
    """
    with gptq.single_thread():
        problem = _problem(stats, targets, options)
        solved = _solve_all(problem, weights, targets, executor)
    factor = problem.factor
    for name, target in targets.items():
        quantized, error = solved[name]
        row = replace(
            plain_row(target),
            error=error,
            damp_percent=None if factor.U is None else factor.damp_percent,
            attempts=factor.attempts,
            num_tokens=stats.num_tokens,
            fallback=factor.reason,
        )
        yield name, Solved(quantized, row)


def _problem(
    stats: InputStatistics, targets: Mapping[str, Target], options: SolverOptions
) -> _Problem:
    if options.gptaq and not stats.paired:
        raise ValueError(f"{stats.name}: GPTAQ needs paired statistics")
    matrix = stats.matrix()
    act_order = any(_scheme(target).act_order for target in targets.values())
    factor = gptq.factorize(matrix, damp_percent=options.damp_percent, act_order=act_order)
    if factor.U is None:
        return _Problem(matrix, factor, None, None, options)
    damped = gptq.damp(matrix, factor.damp_percent)
    cross = stats.cross() if options.gptaq else None
    shift = None if cross is None else _shift(cross, factor)
    return _Problem(matrix, factor, damped, shift, options)


def _shift(cross: torch.Tensor, factor: gptq.Factor) -> torch.Tensor:
    """Return D with which `W + W D` gives the unquantized model's outputs on the inputs at hand.

    `‖Ŵ X - W X_full‖² + λ‖Ŵ - W‖²` is least, without rounding, at `Ŵ = W + W (X_full - X) Xᵀ H⁻¹`
    with H damped by λ: the objective of GPTAQ (Li et al., arXiv 2504.02692, equation 5). Rounding
    towards that weight minimizes it as a whole, where GPTAQ corrects column by column.
    """
    U = factor.natural()
    return (cross @ U.T) @ U


def _solve_all(
    problem: _Problem,
    weights: Mapping[str, torch.Tensor],
    targets: Mapping[str, Target],
    executor: Executor | None,
) -> dict[str, tuple[QuantizedWeight, float]]:
    """Return each module's quantized weight and error.

    Rows do not depend on each other, so modules of one scheme are solved as one, and what is too
    large for the caches in pieces: it is the number of steps that costs time, not their width.
    """
    by_scheme: dict[WeightScheme, list[str]] = {}
    for name, target in targets.items():
        by_scheme.setdefault(_scheme(target), []).append(name)
    solved = {}
    for scheme, names in by_scheme.items():
        dense = [weights[name].float() for name in names]
        for name, W in zip(names, dense, strict=True):
            rtn.fit_groups(W, scheme, name=targets[name].name)  # refuses what has no grid
        label = "/".join(targets[name].name for name in names)
        pieces = torch.cat(dense).split(_piece_rows(dense))
        run = map if executor is None else executor.map
        solve = partial(_solve_rows, problem, scheme=scheme, name=label)
        quantized = concat_out(list(run(solve, pieces)))
        start = 0
        for name, W in zip(names, dense, strict=True):
            part = quantized.rows(start, start + len(W))
            wanted = _wanted(problem, W)
            solved[name] = part, gptq.relative_error(wanted, part.dequantize(), problem.H)
            start += len(W)
    return solved


def _piece_rows(weights: Sequence[torch.Tensor]) -> int:
    """Return the rows solved at a time, whatever the threads: what is worth it in two halves."""
    rows, columns = sum(len(W) for W in weights), weights[0].shape[1]
    halves = 2 if rows * columns >= _WORTH_ELEMENTS else 1
    return max(1, min(-(-rows // halves), _PIECE_ELEMENTS // columns))


def _wanted(problem: _Problem, W: torch.Tensor) -> torch.Tensor:
    """Return the weight to round towards."""
    return W if problem.shift is None else torch.addmm(W, W, problem.shift)


def _solve_rows(
    problem: _Problem, W: torch.Tensor, scheme: WeightScheme, name: str
) -> QuantizedWeight:
    """Search scales, round by GPTQ, descend; plain rounding where there is no factor."""
    factor, options = problem.factor, problem.options
    if problem.damped is None:
        return rtn.quantize(W, scheme, name=name)
    wanted = _wanted(problem, W)
    fine = scheme.bits >= _FINE_BITS
    grid = _search(wanted, factor, scheme, "absmax" if fine else options.scale_search, name)
    columns = gptq.solve_columns(wanted, factor, scheme, grid=grid, name=name)
    if options.passes and not fine:
        target = wanted.T.contiguous()
        columns = refine.descend(columns, target, problem.damped, scheme, passes=options.passes)
    return columns.weight(scheme)


def _search(
    W: torch.Tensor, factor: gptq.Factor, scheme: WeightScheme, search: str, name: str
) -> rtn.Grid | None:
    """Return the grids found before GPTQ; None = fitted to the range on the way."""
    if search == "absmax":
        return None
    loss_of = scales.squared if search == "mse" else scales.hessian_loss(factor.natural())
    return scales.search_groups(W, scheme, loss_of, name=name)


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
