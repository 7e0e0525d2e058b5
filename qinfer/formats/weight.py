"""The one canonical form of a quantized weight, whatever file it came from or goes to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from qinfer.errors import CheckpointError
from qinfer.schemes import WeightScheme


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A linear layer's weight as integer codes and scales.

    `W[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g])` with `g = group_index[k]`; where the file
    has a real offset instead of a zero point (GGUF Q4_1, Q4_K),
    `W[n, k] = scales[n, g] * (codes[n, k] + 2**(bits - 1)) + offsets[n, g]`.

    Args:
        codes: int8 `[out, in]`, the unsigned code minus `2**(bits - 1)`.
        scales: float16, bfloat16 or float32 `[out, groups]`, as stored on disk.
        scheme: bits, group size, symmetry.
        zeros: int16 `[out, groups]`, the unsigned zero point minus `2**(bits - 1)`; None = all 0.
        group_index: int32 `[in]`, the group of each input; None = `k // group_size`.
        offsets: float32 `[out, groups]`, the value of the smallest code; None = the code of zero is
            a whole number (`zeros`).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    scheme: WeightScheme
    zeros: torch.Tensor | None = None
    group_index: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.codes.shape[1]

    def rows(self, begin: int, end: int) -> "QuantizedWeight":
        """Return output rows `[begin, end)`, as views."""
        return replace(
            self,
            codes=self.codes[begin:end],
            scales=self.scales[begin:end],
            zeros=None if self.zeros is None else self.zeros[begin:end],
            offsets=None if self.offsets is None else self.offsets[begin:end],
        )

    def column_groups(self) -> torch.Tensor:
        """Return the group of every input feature, int64 `[in]`."""
        if self.group_index is not None:
            return self.group_index.long()
        size = self.scheme.group_size or self.in_features
        return torch.arange(self.in_features, device=self.codes.device) // size

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the dense weight `[out, in]`: computed in float32, then cast to `dtype`."""
        groups = self.column_groups()
        codes, scales = self.codes.float(), self.scales.float()[:, groups]
        if self.offsets is not None:
            unsigned = codes + (1 << (self.scheme.bits - 1))
            return (unsigned * scales + self.offsets[:, groups]).to(dtype)
        if self.zeros is not None:
            codes = codes - self.zeros.float()[:, groups]
        return (codes * scales).to(dtype)


def concat_out(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Join weights that read the same input along their output, as for fused q, k and v.

    Raises:
        CheckpointError: the parts differ in scheme or group order (see `can_concat`).
    """
    if not can_concat(parts):
        schemes = ", ".join(str(part.scheme) for part in parts)
        raise CheckpointError(f"cannot fuse weights of different layout: {schemes}")
    first = parts[0]
    return QuantizedWeight(
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        scheme=first.scheme,
        zeros=_joined([part.zeros for part in parts]),
        group_index=first.group_index,
        offsets=_joined([part.offsets for part in parts]),
    )


def can_concat(parts: Sequence[QuantizedWeight]) -> bool:
    """Tell whether weights share scheme, zero-point kind and group order, so that they can fuse."""
    first = parts[0]
    return all(
        part.scheme == first.scheme
        and (part.zeros is None) == (first.zeros is None)
        and (part.offsets is None) == (first.offsets is None)
        and _same_index(part.group_index, first.group_index)
        for part in parts[1:]
    )


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the rows of all parts; None if the parts, which are of one form, are None."""
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def _same_index(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)
