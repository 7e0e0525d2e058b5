"""Scales by search: of all grids that cover less than a group's range, the one that loses least.

Pure functions on tensors. Covering the largest value spends codes on a few outliers; a smaller
scale clips them and rounds the rest more finely.
"""

from collections.abc import Callable

import torch

from qinfer.quant import rtn
from qinfer.schemes import WeightScheme

SHRINKS = tuple(1 - 0.03 * step for step in range(14))  # of the range that a grid covers

Loss = Callable[[torch.Tensor], torch.Tensor]  # rounding errors `[out, group]` to losses `[out]`


def search_groups(
    weight: torch.Tensor, scheme: WeightScheme, loss_of: Callable[[int, int], Loss], *, name: str
) -> rtn.Grid:
    """Find the grids of all groups of a weight; a tie goes to the wider grid.

    Args:
        weight: float32 `[out, in]`.
        scheme: bits, group size, symmetry.
        loss_of: the loss of the group that holds the inputs from one to another.
        name: of the weight, for messages.

    Returns:
        A grid of `[out, groups]`.

    Raises:
        NonFiniteError: a value is NaN or infinite.
        QuantizationError: the scale that covers the range exceeds float16.
    """
    size = scheme.group_size or weight.shape[1]
    scales, zeros = [], []
    for start in range(0, weight.shape[1], size):
        values = weight[:, start : start + size]
        loss = loss_of(start, start + values.shape[1])
        ends = torch.stack([values.amin(1), values.amax(1)], dim=1)  # [out, 2]
        best = None
        for shrink in SHRINKS:
            grid = rtn.fit_grid(ends * shrink, scheme, name=name)
            column = rtn.Grid(grid.scale[:, None], grid.zero[:, None], scheme.bits)
            lost = loss(column.decode(column.encode(values)).sub_(values))
            if best is None:
                best, scale, zero = lost, grid.scale, grid.zero
                continue
            better = lost < best
            best = torch.where(better, lost, best)
            scale = torch.where(better, grid.scale, scale)
            zero = torch.where(better, grid.zero, zero)
        scales.append(scale)
        zeros.append(zero)
    return rtn.Grid(torch.stack(scales, dim=1), torch.stack(zeros, dim=1), scheme.bits)


def squared(_: int, __: int) -> Loss:
    """Return the squared error of the weights (`mse`)."""
    return lambda errors: errors.square().sum(1)


def hessian_loss(columns: Callable[[int, int], torch.Tensor]) -> Callable[[int, int], Loss]:
    """Return the squared error of the outputs, once all other inputs have made up for it.

    With `H⁻¹ = Uᵀ U`, the least of `e H e` over the errors outside a group is `g M g`, where g are
    the errors inside and M is the inverse of the group's part of `H⁻¹` (its Schur complement).

    Args:
        columns: of U, float32 `[in, group]`, for the inputs from one to another.
    """

    def loss_of(start: int, end: int) -> Loss:
        part = columns(start, end).double()
        metric = torch.linalg.inv(part.T @ part).float()
        return lambda errors: (errors @ metric).mul_(errors).sum(1)

    return loss_of
