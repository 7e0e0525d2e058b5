"""From the statistics of an input to the quantized weights of the linears that read it.

Owns the choice of solver steps and what is reported of them. It knows nothing of decoder blocks,
samples or files.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

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


ToShift = Callable[[], torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverOptions:
    """How weights are solved. At 8 bits scales are not searched and passes not made.

    Args:
        damp_percent: share of the mean Hessian diagonal that is added to the diagonal.
        scale_search: how the scales of groups are found (see `scales`): `absmax` covers the range,
            `mse` has the least error of the weights, `hessian` that of the outputs.
        passes: over the groups after GPTQ (see `refine`); 0 = none.
    """

    damp_percent: float = gptq.DEFAULT_DAMP_PERCENT
    scale_search: str = "hessian"
    passes: int = 2


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """A module's quantized weight and its line in the report."""

    weight: QuantizedWeight
    row: ModuleRow


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """What the linears that share an input have in common.

    Args:
        H: float32 `[in, in]`.
        factor: of the damped one.
        shift: `[in, in]`, what GPTAQ adds to a weight: `W @ shift` (see `gptaq`); None = nothing.
        options: how to solve.
    """

    H: torch.Tensor
    factor: gptq.Factor
    shift: torch.Tensor | None
    options: SolverOptions


def solve_modules(
    stats: InputStatistics,
    weights: Mapping[str, torch.Tensor],
    targets: Mapping[str, Target],
    options: SolverOptions,
    *,
    shift: ToShift | None = None,
    executor: Executor | None = None,
) -> Iterator[tuple[str, Solved]]:
    """Quantize the linears that share an input; its Hessian is factored once.

    Args:
        stats: of the input, complete; used up.
        weights: `[out, in]`, any float dtype, by name.
        targets: the linears to solve, by the same names; every one has a scheme.
        options: how.
        shift: gives what GPTAQ adds to each weight, once the Hessian is factored, which takes the
            most memory; None = nothing.
        executor: where pieces of weights are solved, each by one thread; None = here.

    Yields:
        Name and result, in the order of `targets`.

    Raises:
        QuantizationError: no calibration token, or a scale exceeds float16.
        NonFiniteError: the statistics or a weight are not finite.
    """
    with gptq.single_thread():
        solved = _solve_all(_problem(stats, targets, options, shift), weights, targets, executor)
    for name, result in solved.items():
        yield name, replace(result, row=replace(result.row, num_tokens=stats.num_tokens))


def _problem(
    stats: InputStatistics,
    targets: Mapping[str, Target],
    options: SolverOptions,
    shift: ToShift | None,
) -> _Problem:
    matrix = stats.matrix()
    act_order = any(_scheme(target).act_order for target in targets.values())
    factor = gptq.factorize(matrix, damp_percent=options.damp_percent, act_order=act_order)
    taken = None if shift is None else shift()
    return _Problem(matrix, factor, None if factor.U is None else taken, options)


def _solve_all(
    problem: _Problem,
    weights: Mapping[str, torch.Tensor],
    targets: Mapping[str, Target],
    executor: Executor | None,
) -> dict[str, Solved]:
    """Return each module's quantized weight and its line, as far as it is known here.

    Rows do not depend on each other, so modules of one scheme are solved as one, and what is too
    large for the caches in pieces: it is the number of steps that costs time, not their width.
    """
    by_scheme: dict[WeightScheme, list[str]] = {}
    for name, target in targets.items():
        by_scheme.setdefault(_scheme(target), []).append(name)
    parts: dict[str, QuantizedWeight] = {}
    factor = problem.factor
    damping = nullcontext() if factor.U is None else gptq.damped(problem.H, factor.damp_percent)
    with damping:
        for scheme, names in by_scheme.items():
            rows = _Rows({targets[name].name: weights[name] for name in names}, scheme)
            run = map if executor is None else executor.map
            quantized = concat_out(list(run(partial(_solve_rows, problem, rows), rows.pieces())))
            for name, (start, end) in zip(names, rows.spans(), strict=True):
                parts[name] = quantized.rows(start, end)
    solved = {}
    for name, target in targets.items():
        row = replace(
            plain_row(target),
            error=_error(problem, weights[name].float(), parts[name]),
            damp_percent=None if factor.U is None else factor.damp_percent,
            attempts=factor.attempts,
            fallback=factor.reason,
        )
        solved[name] = Solved(parts[name], row)
    return solved


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of weights that are solved as one, made float32 as they are asked for.

    Args:
        weights: `[out, in]`, any float dtype, by full name.
        scheme: of all of them.
    """

    weights: Mapping[str, torch.Tensor]
    scheme: WeightScheme

    @property
    def label(self) -> str:
        """Return all names."""
        return "/".join(self.weights)

    def spans(self) -> list[tuple[int, int]]:
        """Return where each weight begins and ends."""
        ends = list(accumulate(len(W) for W in self.weights.values()))
        return list(pairwise([0, *ends]))

    def pieces(self) -> list[tuple[int, int]]:
        """Return the rows solved at a time, whatever the threads: what is worth it in halves."""
        rows, columns = self.spans()[-1][1], next(iter(self.weights.values())).shape[1]
        halves = 2 if rows * columns >= _WORTH_ELEMENTS else 1
        step = max(1, min(-(-rows // halves), _PIECE_ELEMENTS // columns))
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]

    def read(self, first: int, last: int) -> torch.Tensor:
        """Return some rows, `[last - first, in]`.

        Raises:
            NonFiniteError: a value is NaN or infinite; names the weight.
            QuantizationError: a scale exceeds float16; names the weight.
        """
        parts = []
        for (name, W), (start, end) in zip(self.weights.items(), self.spans(), strict=True):
            part = W[max(first - start, 0) : max(min(last, end) - start, 0)].float()
            if len(part):
                rtn.fit_groups(part, self.scheme, name=name)  # refuses what has no grid
                parts.append(part)
        return torch.cat(parts)


def _error(problem: _Problem, W: torch.Tensor, quantized: QuantizedWeight) -> float:
    """Return the relative error of the outputs."""
    wanted = _wanted(problem, W)
    change = torch.empty_like(wanted)
    step = max(1, _PIECE_ELEMENTS // W.shape[1])
    for start in range(0, len(W), step):
        end = min(start + step, len(W))
        torch.sub(wanted[start:end], quantized.rows(start, end).dequantize(), out=change[start:end])
    return gptq.relative_error(wanted, change, problem.H)


def _wanted(problem: _Problem, W: torch.Tensor) -> torch.Tensor:
    """Return the weight to round towards."""
    return W if problem.shift is None else torch.addmm(W, W, problem.shift)


def _solve_rows(problem: _Problem, rows: _Rows, piece: tuple[int, int]) -> QuantizedWeight:
    """Search scales, round by GPTQ, descend; plain rounding where there is no factor.

    Args:
        problem: with H damped.
        rows: all rows.
        piece: the first and the one behind the last that are solved.
    """
    factor, options, scheme, name = problem.factor, problem.options, rows.scheme, rows.label
    W = rows.read(*piece)
    if factor.U is None:
        return rtn.quantize(W, scheme, name=name)
    wanted = _wanted(problem, W)
    fine = scheme.bits >= _FINE_BITS
    grid = _search(wanted, factor, scheme, "absmax" if fine else options.scale_search, name)
    columns = gptq.solve_columns(wanted, factor, scheme, grid=grid, name=name)
    if options.passes and not fine:
        target = wanted.T.contiguous()
        columns = refine.descend(columns, target, problem.H, scheme, passes=options.passes)
    return columns.weight(scheme)


def _search(
    W: torch.Tensor, factor: gptq.Factor, scheme: WeightScheme, search: str, name: str
) -> rtn.Grid | None:
    """Return the grids found before GPTQ; None = fitted to the range on the way."""
    if search == "absmax":
        return None
    loss_of = scales.squared if search == "mse" else scales.hessian_loss(factor.columns)
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
