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
_STRIP = 16  # columns corrected one by one; the rest of a block gets a strip at a time


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

    def columns(self, start: int, end: int) -> torch.Tensor:
        """Return columns of U by their number in the weight, `[in, end - start]`.

        `H⁻¹ = Uᵀ U` holds for them as they stand too, but that U is not triangular.

        Raises:
            ValueError: there is no factor.
        """
        if self.U is None:
            raise ValueError(f"no factor: {self.reason}")
        if self.order is None:
            return self.U[:, start:end]
        return self.U[:, torch.argsort(self.order)[start:end]]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A weight on the grid of its groups, input by input: `w = level * scale`.

    Args:
        levels: float32 `[in, out]`, whole: codes minus the zero point.
        scale: float32 `[groups, out]`, exactly representable in float16.
        zero: float32 `[groups, out]`, whole; None = symmetric, all 0.
    """

    levels: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None

    def dense(self, size: int) -> torch.Tensor:
        """Return the values, `[in, out]`, of groups of `size` inputs."""
        return self.levels * spread(self.scale, size, len(self.levels))

    def weight(self, scheme: WeightScheme) -> QuantizedWeight:
        """Return the canonical form, `[out, in]`."""
        zero = torch.zeros_like(self.scale) if self.zero is None else self.zero
        size = scheme.group_size or len(self.levels)
        codes = self.levels + spread(zero, size, len(self.levels))
        return rtn.assemble(codes.T, rtn.Grid(self.scale.T, zero.T, scheme.bits), scheme)


def spread(groups: torch.Tensor, size: int, in_features: int) -> torch.Tensor:
    """Repeat what `[groups, out]` says for every input of a group: `[in, out]`."""
    return groups.repeat_interleave(size, 0)[:in_features]


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
        H: float32 `[in, in]`, symmetric, `2/n Σ x xᵀ`; damped in place meanwhile (see `damped`).
        damp_percent: share of the mean diagonal that is added to the diagonal at first.
        act_order: quantize the columns in the order of descending diagonal.
    """
    with single_thread():
        diagonal = H.diagonal()
        if not bool((diagonal != 0).any()):
            return Factor(None, None, damp_percent, 0, "all calibration inputs are zero")
        order = torch.argsort(diagonal, descending=True, stable=True) if act_order else None
        steps = damping_steps(damp_percent)
        for attempt, step in enumerate(steps, start=1):
            with damped(H, step):
                U = inverse_factor(H, order)
            if U is not None:
                return Factor(U, order, step, attempt)
    tried = ", ".join(f"{step:g}" for step in steps)
    reason = f"the Hessian is not positive definite at damping {tried}"
    return Factor(None, order, steps[-1], len(steps), reason)


def damping_steps(damp_percent: float) -> list[float]:
    """Return the dampings to try in turn until a Hessian can be factored."""
    return [damp_percent, *(step for step in _DAMPING_STEPS if step > damp_percent)]


@contextmanager
def damped(H: torch.Tensor, damp_percent: float) -> Iterator[None]:
    """Add a share of the mean diagonal to the diagonal, and give it back its values at the end.

    In place, because a second matrix costs as much memory as all else that a wide layer's solving
    keeps. A column that no token used has no error to hand on: its diagonal is 1 more, so that it
    is rounded on its own.

    Args:
        H: float32 `[in, in]`; some of its diagonal is not 0.
        damp_percent: the share.
    """
    diagonal = H.diagonal()
    before = diagonal.clone()
    alive = before != 0
    share = damp_percent * float(before[alive].double().mean())
    diagonal.add_(torch.where(alive, share, share + 1.0))
    try:
        yield
    finally:
        diagonal.copy_(before)


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
            solved = solve_columns(dense, factor, scheme, block_size=block_size, name=name)
            weight = solved.weight(scheme)
        error = relative_error(dense, dense - weight.dequantize(), H)
    used = None if factor.U is None else factor.damp_percent
    return GPTQResult(weight, error, used, factor.attempts, factor.reason)


def relative_error(W: torch.Tensor, change: torch.Tensor, H: torch.Tensor) -> float:
    """Return `‖C X‖² / ‖W X‖²` from the Hessian of X; 0 where the outputs are all zero.

    Args:
        W: float32 `[out, in]`.
        change: `[out, in]`, C: what quantizing takes from the weight.
        H: float32 `[in, in]`.
    """
    total, lost = _energy(W, H), _energy(change, H)
    return max(lost, 0.0) / total if total > 0 else 0.0


def _energy(W: torch.Tensor, H: torch.Tensor) -> float:
    """Return the sum of `w H w` over the rows of W, each pair of columns once."""
    total = 0.0
    for start in range(0, W.shape[1], _PANEL):
        end = min(start + _PANEL, W.shape[1])
        product = W[:, :start] @ (2 * H[:start, start:end])
        product.addmm_(W[:, start:end], H[start:end, start:end])
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


def inverse_factor(H: torch.Tensor, order: torch.Tensor | None = None) -> torch.Tensor | None:
    """Return the upper triangular U with `H⁻¹ = Uᵀ U`, or None if H is not positive definite.

    With the columns reversed, `H = L Lᵀ` becomes `H = R Rᵀ` with R upper triangular, so
    `U = R⁻¹` takes one Cholesky and one triangular inverse, and H is never inverted. All of it
    happens in one float64 matrix: beside H, 12 bytes per entry at the most.

    Args:
        H: float32 `[in, in]`, symmetric.
        order: of the columns of U; None = as they stand.
    """
    index = torch.arange(len(H)) if order is None else order
    lower = _gather(H, index.flip(0))
    info = torch.empty((), dtype=torch.int32)
    torch.linalg.cholesky_ex(lower, out=(lower, info))
    if int(info) != 0:
        return None
    _invert_lower(lower)
    return _reversed(lower)


def _gather(H: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return a symmetric matrix in another order, float64, by columns as LAPACK wants it."""
    rows = torch.empty(len(H), len(H), dtype=torch.float64)
    for start in range(0, len(H), _PANEL):
        rows[start : start + _PANEL] = H[index[start : start + _PANEL, None], index]
    return rows.T


def _reversed(lower: torch.Tensor) -> torch.Tensor | None:
    """Return a matrix with rows and columns reversed, float32; None if that is not finite."""
    size = len(lower)
    upper = torch.empty_like(lower, dtype=torch.float32)  # by columns too
    for start in range(0, size, _PANEL):
        end = min(start + _PANEL, size)
        columns = upper[:, start:end].copy_(lower[:, size - end : size - start].flip(0, 1))
        if not bool(torch.isfinite(columns).all()):
            return None
    return upper


def _invert_lower(L: torch.Tensor) -> None:
    """Invert a lower triangular matrix in place, by halves: a third of a solve for identity."""
    size = L.shape[0]
    if size <= _SMALL_TRIANGLE:
        L.copy_(torch.linalg.solve_triangular(L, torch.eye(size, dtype=L.dtype), upper=False))
        return
    half = size // 2
    first, last, between = L[:half, :half], L[half:, half:], L[half:, :half]
    _invert_lower(first)
    _invert_lower(last)
    between.copy_(last @ (between @ first)).neg_()


def solve_columns(
    W: torch.Tensor,
    factor: Factor,
    scheme: WeightScheme,
    *,
    grid: rtn.Grid | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    name: str = "weight",
) -> Columns:
    """Quantize column after column, each time correcting the columns that follow.

    Args:
        W: float32 `[out, in]`.
        factor: of the inputs, with a `U`.
        scheme: bits, group size, symmetry.
        grid: `[out, groups]`, used as it is. None: with columns as they stand, a group's grid is
            fitted when its first column is due, to what the corrections made of it; with columns
            in another order it is fitted to the weight as it was. The layout stays sequential.
        block_size: columns whose updates of later columns are applied together.
        name: of the weight, for messages.

    Raises:
        NonFiniteError: the weight holds NaN or infinite values.
        QuantizationError: a scale exceeds float16.
    """
    U, order = factor.U, factor.order
    if U is None:
        raise ValueError(f"{name}: {factor.reason}")
    in_features = W.shape[1]
    size = scheme.group_size or in_features
    if grid is None and order is not None:
        grid = rtn.fit_groups(W, scheme, name=name)
    columns = (W if order is None else W[:, order]).T.contiguous()  # [in, out]
    groups = torch.arange(in_features) // size
    groups = groups if order is None else groups[order]
    scale = torch.empty(scheme.num_groups(in_features), len(W))
    zero = torch.empty_like(scale)
    if grid is not None:
        scale.copy_(grid.scale.T)
        zero.copy_(grid.zero.T)
    levels = torch.empty_like(columns)
    for start, end in _blocks(in_features, size if grid is None else in_features, block_size):
        if grid is None and start % size == 0:
            fitted = rtn.fit_grid(columns[start : start + size].T, scheme, name=name)
            scale[start // size], zero[start // size] = fitted.scale, fitted.zero
        member = groups[start:end]
        levels[start:end], errors = round_columns(
            columns[start:end],
            U[start:end, start:end],
            scale[member],
            None if scheme.symmetric else zero[member],
            scheme.bits,
        )
        columns[end:].addmm_(U[start:end, end:].T, errors, alpha=-1)
    if order is not None:
        levels = torch.empty_like(levels).index_copy_(0, order, levels)
    return Columns(levels, scale, None if scheme.symmetric else zero)


def round_columns(
    columns: torch.Tensor,
    U: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round the columns of one block, handing the errors of each on to those behind it.

    Args:
        columns: float32 `[n, out]`; used up.
        U: upper triangular `[n, n]`, this block's part of the factor.
        scale: `[n, out]`, that of every column.
        zero: the same; None = symmetric.
        bits: width of a code.

    Returns:
        The levels `[n, out]` and the errors `[n, out]` as multiples of the rows of the factor: what
        columns behind the block must be corrected by, and the squares of which add up to the loss.
    """
    low, high = rtn.code_range(bits)
    levels, errors = torch.empty_like(columns), torch.empty_like(columns)
    pivots = U.diagonal().tolist()
    num_columns = len(columns)
    for start in range(0, num_columns, _STRIP):
        end = min(start + _STRIP, num_columns)
        for column in range(start, end):
            level = torch.div(columns[column], scale[column], out=levels[column]).round_()
            if zero is None:
                level.clamp_(low, high)
            else:
                level.add_(zero[column]).clamp_(low, high).sub_(zero[column])
            error = errors[column]
            torch.addcmul(columns[column], level, scale[column], value=-1, out=error)
            error.mul_(1 / pivots[column])
            columns[column + 1 : end].addr_(U[column, column + 1 : end], error, alpha=-1)
        columns[end:].addmm_(U[start:end, end:].T, errors[start:end], alpha=-1)
    return levels, errors


def _blocks(in_features: int, span: int, block_size: int) -> Iterator[tuple[int, int]]:
    """Yield blocks of at most `block_size` columns, none of which crosses a multiple of `span`: a
    grid is then always fitted to columns that hold all corrections from the columns before.
    """
    for span_start in range(0, in_features, span):
        span_end = min(span_start + span, in_features)
        for block_start in range(span_start, span_end, block_size):
            yield block_start, min(block_start + block_size, span_end)
