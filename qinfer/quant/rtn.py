"""Round-to-nearest: the grid of a group (scale and zero point) and the codes on it.

Pure functions on tensors. The grid is fitted here and nowhere else, so that GPTQ and plain
rounding differ only in what they do with the rounding errors. Codes and zero points are signed
throughout: the unsigned value of the file minus `2**(bits - 1)`.
"""

from dataclasses import dataclass

import torch

from qinfer.errors import NonFiniteError, QuantizationError
from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import WeightScheme

SCALE_DTYPE = torch.float16  # what a GPTQ file stores
# The smallest positive float16. A scale below it would be stored as 0 and divide by zero.
SMALLEST_SCALE = 2.0**-24


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The quantization grid of groups: `w ≈ scale * (code - zero)`.

    Args:
        scale: float32 `[..., groups]`, every value exactly representable in float16.
        zero: float32 `[..., groups]`, whole numbers in the range of a code.
        bits: width of a code.
    """

    scale: torch.Tensor
    zero: torch.Tensor
    bits: int

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the nearest codes (float32, whole, clamped) of values shaped as the scales."""
        low, high = code_range(self.bits)
        return (values.div(self.scale).round_() + self.zero).clamp_(low, high)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the values that codes stand for."""
        return self.scale * (codes - self.zero)


def code_range(bits: int) -> tuple[int, int]:
    """Return the smallest and the largest signed code."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def fit_grid(values: torch.Tensor, scheme: WeightScheme, *, name: str) -> Grid:
    """Fit the grid of groups to the range of their values.

    Symmetric: `scale = 2 absmax / (2**bits - 1)`. Asymmetric: the range is widened to hold 0, the
    zero point is a whole number. The scale is rounded to float16 before anything is computed from
    it, and raised to the smallest float16 where it would vanish, so a group of zeros is exactly 0.

    Args:
        values: float32 `[..., group]`; the grid has one entry per leading index.
        scheme: bits and symmetry.
        name: of the weight, for messages.

    Raises:
        NonFiniteError: a value is NaN or infinite.
        QuantizationError: a scale exceeds float16.
    """
    levels = 2**scheme.bits - 1
    low, high = code_range(scheme.bits)
    # With 0 inside the range, padding by zeros changes nothing and 0 is on the grid.
    smallest = values.amin(-1).clamp_(max=0.0)
    largest = values.amax(-1).clamp_(min=0.0)
    spread = 2.0 * torch.maximum(-smallest, largest) if scheme.symmetric else largest - smallest
    if not bool(torch.isfinite(spread).all()):
        raise NonFiniteError(f"{name}: the weight holds NaN or infinite values")
    scale = (spread / levels).to(SCALE_DTYPE).float().clamp_(min=SMALLEST_SCALE)
    if not bool(torch.isfinite(scale).all()):
        raise QuantizationError(
            f"{name}: a scale of {float(spread.max()) / levels:.4g} exceeds float16 (65504); "
            "leave this module unquantized with on_misfit=skip, or use more bits or smaller groups"
        )
    if scheme.symmetric:
        return Grid(scale, torch.zeros_like(scale), scheme.bits)
    return Grid(scale, (low - smallest / scale).round_().clamp_(low, high), scheme.bits)


def fit_groups(weight: torch.Tensor, scheme: WeightScheme, *, name: str) -> Grid:
    """Fit the grids of all groups of a weight: `[out, in]` to a grid of `[out, groups]`."""
    out_features, in_features = weight.shape
    num_groups = scheme.num_groups(in_features)
    size = scheme.group_size or in_features
    padded = torch.nn.functional.pad(weight, (0, num_groups * size - in_features))
    return fit_grid(padded.view(out_features, num_groups, size), scheme, name=name)


def assemble(codes: torch.Tensor, grid: Grid, scheme: WeightScheme) -> QuantizedWeight:
    """Put codes `[out, in]` and their grids `[out, groups]` into the canonical form."""
    return QuantizedWeight(
        codes=codes.to(torch.int8).contiguous(),
        scales=grid.scale.to(SCALE_DTYPE).contiguous(),
        scheme=scheme,
        zeros=None if scheme.symmetric else grid.zero.to(torch.int16).contiguous(),
    )


def quantize(
    weight: torch.Tensor, scheme: WeightScheme, *, name: str = "weight"
) -> QuantizedWeight:
    """Round a weight to the nearest points of its groups' grids.

    Args:
        weight: `[out, in]`, any float dtype; a last group may be short.
        scheme: bits, group size, symmetry; the order of columns does not matter here.
        name: of the weight, for messages.

    Raises:
        NonFiniteError: a value is NaN or infinite.
        QuantizationError: a scale exceeds float16.
    """
    dense = weight.float()
    in_features = dense.shape[1]
    grid = fit_groups(dense, scheme, name=name)
    columns = torch.arange(in_features, device=dense.device) // (scheme.group_size or in_features)
    spread = Grid(grid.scale[:, columns], grid.zero[:, columns], scheme.bits)
    return assemble(spread.encode(dense), grid, scheme)
