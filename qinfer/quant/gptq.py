"""GPTQ as pure functions: a weight and a Hessian in, a quantized weight and its error out.

Frantar et al., arXiv 2210.17323, Algorithm 1. The Hessian is factored in float64, the columns are
rounded in float32, on one thread, so that equal inputs give equal bytes. What the functions do
not know: where the weight and the Hessian come from, and what file they go to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from qinfer.formats.weight import QuantizedWeight
from qinfer.quant import rtn
from qinfer.schemes import WeightScheme

DEFAULT_DAMP_PERCENT = 0.01
DEFAULT_BLOCK_SIZE = 128
# Tried after the damping asked for, as far as they are larger; then round-to-nearest takes over.
_DAMPING_STEPS = (0.01, 0.1, 1.0)
_SMALL_TRIANGLE = 128
_PANEL = 128


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """The inverse of a damped Hessian, `H⁻¹ = Uᵀ U`, shared by all weights that read its input.

    Args:
        U: upper triangular, float32 `[in, in]`, of the columns in `order`; None = no damping tried
            made the Hessian positive definite.
        order: int64 `[in]`, the columns as they are quantized; None = as they stand.
        damp_percent: the damping used, as a share of the mean diagonal; the last one if all failed.
        attempts: dampings tried.
        reason: why `U` is None.
    """

    U: torch.Tensor | None
    order: torch.Tensor | None
    damp_percent: float
    attempts: int
    reason: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GPTQResult:
    """A quantized weight and how it was reached.

    Args:
        weight: the codes and scales.
        error: `‖(W - Ŵ) X‖² / ‖W X‖²` over the calibration tokens.
        damp_percent: the damping used; None where round-to-nearest took over.
        attempts: dampings tried.
        fallback: why round-to-nearest took over; None = it did not.
    """

    weight: QuantizedWeight
    error: float
    damp_percent: float | None
    attempts: int
    fallback: str | None = None


def factorize(
    H: torch.Tensor, *, damp_percent: float = DEFAULT_DAMP_PERCENT, act_order: bool = False
) -> Factor:
    """Factor the inverse of a Hessian, raising the damping in bounded steps until it works.

    Args:
        H: `[in, in]`, `2/n Σ x xᵀ`.
        damp_percent: share of the mean diagonal that is added to the diagonal at first.
        act_order: quantize the columns in the order of descending diagonal.
    """
    with single_thread():
        hessian = H.double()
        hessian = (hessian + hessian.T) / 2
        diagonal = hessian.diagonal().clone()
        alive = diagonal != 0
        if not bool(alive.any()):
            return Factor(None, None, damp_percent, 0, "all calibration inputs are zero")
        # A column that no token used has no error to hand on: it is rounded on its own.
        hessian.diagonal()[~alive] = 1.0
        order = torch.argsort(diagonal, descending=True, stable=True) if act_order else None
        if order is not None:
            hessian = hessian[order][:, order]
        mean = float(diagonal[alive].mean())
        steps = [damp_percent, *(step for step in _DAMPING_STEPS if step > damp_percent)]
        for attempt, step in enumerate(steps, start=1):
            damped = hessian.clone()
            damped.diagonal().add_(step * mean)
            U = _inverse_factor(damped)
            if U is not None:
                return Factor(U, order, step, attempt)
    tried = ", ".join(f"{step:g}" for step in steps)
    reason = f"the Hessian is not positive definite at damping {tried}"
    return Factor(None, order, steps[-1], len(steps), reason)


def solve(
    W: torch.Tensor,
    H: torch.Tensor,
    scheme: WeightScheme,
    *,
    damp_percent: float = DEFAULT_DAMP_PERCENT,
    block_size: int = DEFAULT_BLOCK_SIZE,
    name: str = "weight",
) -> GPTQResult:
    """Quantize a weight so that its outputs on the calibration tokens change least.

    Args:
        W: `[out, in]`, any float dtype.
        H: float32 `[in, in]`, `2/n Σ x xᵀ`.
        scheme: bits, group size, symmetry, order of columns.
        damp_percent: see `factorize`.
        block_size: columns whose updates of later columns are applied together.
        name: of the weight, for messages.

    Raises:
        NonFiniteError: the weight holds NaN or infinite values.
        QuantizationError: a scale exceeds float16.
    """
    factor = factorize(H, damp_percent=damp_percent, act_order=scheme.act_order)
    return solve_factored(W, H, scheme, factor, block_size=block_size, name=name)


def solve_factored(
    W: torch.Tensor,
    H: torch.Tensor,
    scheme: WeightScheme,
    factor: Factor,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    name: str = "weight",
) -> GPTQResult:
    """Do what `solve` does with a factor that was computed before, in the scheme's order."""
    dense = W.float()
    with single_thread():
        if factor.U is None:
            weight = rtn.quantize(dense, scheme, name=name)
        else:
            weight = _solve_columns(dense, factor.U, factor.order, scheme, block_size, name)
        error = relative_error(dense, weight.dequantize(), H)
    used = None if factor.U is None else factor.damp_percent
    return GPTQResult(weight, error, used, factor.attempts, factor.reason)


def relative_error(W: torch.Tensor, quantized: torch.Tensor, H: torch.Tensor) -> float:
    """Return `‖(W - Ŵ) X‖² / ‖W X‖²` from the Hessian of X; 0 where the outputs are all zero."""
    # Each pair of columns once: w H w = w T w with T upper triangular, half of the products.
    T = 2 * H.triu(1)
    T.diagonal().copy_(H.diagonal())
    total, lost = _energy(W, T), _energy(W - quantized, T)
    return max(lost, 0.0) / total if total > 0 else 0.0


def _energy(W: torch.Tensor, T: torch.Tensor) -> float:
    """Return the sum of `w T w` over the rows of W, for an upper triangular T."""
    total = 0.0
    for start in range(0, W.shape[1], _PANEL):
        end = start + _PANEL
        product = W[:, :end] @ T[:end, start:end]
        total += float((product * W[:, start:end]).sum(dtype=torch.float64))
    return total


@contextmanager
def single_thread() -> Iterator[None]:
    """Run torch on one thread, so that sums do not depend on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor | None:
    """Return the upper triangular U with `H⁻¹ = Uᵀ U`, or None if H is not positive definite.

    With the columns reversed, `H = L Lᵀ` becomes `H = R Rᵀ` with R upper triangular, so
    `U = R⁻¹` takes one Cholesky and one triangular inverse, and H is never inverted.
    """
    lower, info = torch.linalg.cholesky_ex(hessian.flip(0, 1))
    if int(info) != 0:
        return None
    U = _invert_upper(lower.flip(0, 1)).float()
    return U if bool(torch.isfinite(U).all()) else None


def _invert_upper(R: torch.Tensor) -> torch.Tensor:
    """Invert an upper triangular matrix by halves: a third of the work of a solve for identity."""
    size = R.shape[0]
    if size <= _SMALL_TRIANGLE:
        identity = torch.eye(size, dtype=R.dtype)
        inverse: torch.Tensor = torch.linalg.solve_triangular(R, identity, upper=True)
        return inverse
    half = size // 2
    first, last = _invert_upper(R[:half, :half]), _invert_upper(R[half:, half:])
    inverse = torch.zeros_like(R)
    inverse[:half, :half], inverse[half:, half:] = first, last
    inverse[:half, half:] = -(first @ (R[:half, half:] @ last))
    return inverse


def _solve_columns(
    W: torch.Tensor,
    U: torch.Tensor,
    order: torch.Tensor | None,
    scheme: WeightScheme,
    block_size: int,
    name: str,
) -> QuantizedWeight:
    """Quantize column after column, each time correcting the columns that follow.

    Columns as they stand: a group's grid is fitted when its first column is due, to what the
    corrections made of it. Columns in another order: grids are static, fitted to the weight as it
    was, so the codes go back to their places and the layout stays sequential.
    """
    in_features = W.shape[1]
    size = scheme.group_size or in_features
    groups = [column // size for column in range(in_features)]
    grids: list[rtn.Grid] = []
    if order is not None:
        fitted = rtn.fit_groups(W, scheme, name=name)
        groups = [groups[column] for column in order.tolist()]
        grids = [
            rtn.Grid(*pair, scheme.bits) for pair in zip(fitted.scale.T, fitted.zero.T, strict=True)
        ]
    columns = (W if order is None else W[:, order]).T.contiguous()  # [in, out]
    codes = torch.empty_like(columns)
    for block_start, block_end in _blocks(in_features, size, block_size):
        errors = torch.empty_like(columns[block_start:block_end])
        for column in range(block_start, block_end):
            if order is None and column % size == 0:
                grids.append(rtn.fit_grid(columns[column : column + size].T, scheme, name=name))
            grid = grids[groups[column]]
            codes[column] = grid.encode(columns[column])
            error = (columns[column] - grid.decode(codes[column])) / U[column, column]
            errors[column - block_start] = error
            columns[column + 1 : block_end].addr_(
                U[column, column + 1 : block_end], error, alpha=-1
            )
        columns[block_end:].addmm_(U[block_start:block_end, block_end:].T, errors, alpha=-1)
    if order is not None:
        codes = torch.empty_like(codes).index_copy_(0, order, codes)
    stacked = rtn.Grid(
        torch.stack([grid.scale for grid in grids], dim=1),
        torch.stack([grid.zero for grid in grids], dim=1),
        scheme.bits,
    )
    return rtn.assemble(codes.T, stacked, scheme)


def _blocks(in_features: int, group: int, block_size: int) -> Iterator[tuple[int, int]]:
    """Yield blocks of at most `block_size` columns, cut so that no group larger than a block, and
    no block larger than a group, begins in the middle of the other: a grid is then always fitted
    to columns that hold all corrections from the columns before.
    """
    span = group * (block_size // group) if group <= block_size else group
    for span_start in range(0, in_features, span):
        span_end = min(span_start + span, in_features)
        for block_start in range(span_start, span_end, block_size):
            yield block_start, min(block_start + block_size, span_end)
