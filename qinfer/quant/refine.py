"""Descent after GPTQ: one group after the other is solved anew while the others stand still.

GPTQ rounds a column without knowing how those before it could still change, and leaves the scales
as they were found. Here a group's levels and scale change together, and only where that lowers the
error, so the error never rises. The idea of descending over columns is that of QuantEase (Behdin
et al., arXiv 2309.01885, section 3); whole groups at a time are ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qinfer.quant import gptq, rtn
from qinfer.quant.gptq import Columns
from qinfer.schemes import WeightScheme

# Of the present scale. The first is what a group keeps if nothing is better.
_FACTORS = (1.0, 0.97, 1.03)


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """The inputs of one group: where they are, their Hessian and its factor, in descending order.

    Args:
        index: of the group.
        span: its inputs.
        order: int64 `[n]`, inputs by descending diagonal.
        H: float32 `[n, n]`, in that order.
        U: upper triangular, `H⁻¹ = Uᵀ U`.
    """

    index: int
    span: slice
    order: torch.Tensor
    H: torch.Tensor
    U: torch.Tensor


def descend(
    start: Columns, target: torch.Tensor, H: torch.Tensor, scheme: WeightScheme, *, passes: int
) -> Columns:
    """Lower `tr((W - Ŵ) H (W - Ŵ)ᵀ)` by passes over the groups.

    Args:
        start: the solution to improve.
        target: float32 `[in, out]`, the weight W.
        H: float32 `[in, in]`, positive definite: damped.
        scheme: bits, group size, symmetry.
        passes: over all groups.
    """
    size = scheme.group_size or len(target)
    result = Columns(start.levels.clone(), start.scale.clone(), start.zero)
    gradient = H @ (target - result.dense(size))  # [in, out], kept up to date
    groups = list(_groups(H, size))
    for _ in range(passes):
        for group in groups:
            change = _improve(result, group, gradient[group.span], scheme.bits)
            gradient.addmm_(H[:, group.span], change, alpha=-1)
    return result


def _groups(H: torch.Tensor, size: int) -> Iterator[_Group]:
    for index, start in enumerate(range(0, len(H), size)):
        span = slice(start, min(start + size, len(H)))
        block = H[span, span]
        order = torch.argsort(block.diagonal(), descending=True, stable=True)
        ordered = block[order][:, order]
        U = gptq.inverse_factor(block, order)
        if U is not None:
            yield _Group(index, span, order, ordered, U)


def _improve(result: Columns, group: _Group, gradient: torch.Tensor, bits: int) -> torch.Tensor:
    """Solve one group anew, row by row of the weight; return what its values changed by.

    Args:
        result: changed in place.
        group: the group.
        gradient: `[n, out]`, `H (W - Ŵ)` of its inputs: all that the other groups matter for.
        bits: width of a code.
    """
    scale = result.scale[group.index]
    zero = None if result.zero is None else result.zero[group.index]
    before = result.levels[group.span][group.order]
    pull = gradient[group.order]
    # Unrounded, the group would best move by H⁻¹ times its gradient.
    move = group.U.T @ (group.U @ pull)
    wanted = (before * scale).add_(move)
    error = move.mul_(pull).sum(0)
    levels, chosen, lost = _round(wanted, group, scale, zero, bits)
    levels, chosen, lost = _fit_scale(wanted, group, levels, chosen, lost)
    better = lost < error
    levels = torch.where(better, levels, before)
    chosen = torch.where(better, chosen, scale)
    change = torch.empty_like(levels).index_copy_(0, group.order, levels * chosen - before * scale)
    result.levels[group.span.start + group.order] = levels
    result.scale[group.index] = chosen
    return change


def _round(
    wanted: torch.Tensor,
    group: _Group,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bits: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a group with several scales; return levels, scale and loss of each row's best."""
    count, (n, rows) = len(_FACTORS), wanted.shape
    scales = torch.cat([_storable(scale * factor) for factor in _FACTORS])  # [count * out]
    zeros = None if zero is None else zero.repeat(count).expand(n, -1)
    columns = wanted.repeat(1, count)
    levels, errors = gptq.round_columns(columns, group.U, scales.expand(n, -1), zeros, bits)
    lost, choice = errors.square_().sum(0).view(count, rows).min(0)
    index = choice * rows + torch.arange(rows)
    return levels[:, index], scales[index], lost


def _fit_scale(
    wanted: torch.Tensor,
    group: _Group,
    levels: torch.Tensor,
    scale: torch.Tensor,
    lost: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take the scale of least squares for the levels, where it is better still."""
    product = group.H @ levels
    energy = (product * levels).sum(0)
    fitted = _storable((product * wanted).sum(0) / energy)  # NaN where all levels are 0
    error = wanted - levels * fitted
    loss = (group.H @ error).mul_(error).sum(0)
    better = (loss < lost) & (fitted > 0)
    return levels, torch.where(better, fitted, scale), torch.where(better, loss, lost)


def _storable(scale: torch.Tensor) -> torch.Tensor:
    """Round to what a file holds."""
    largest = torch.finfo(rtn.SCALE_DTYPE).max
    return scale.clamp(rtn.SMALLEST_SCALE, largest).to(rtn.SCALE_DTYPE).float()
