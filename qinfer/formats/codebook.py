"""A weight whose codes are places in a table of values: NF4 and FP4. No kernel runs these codes."""

from dataclasses import dataclass

import torch

_PIECE = 1 << 20  # codes that are looked up at a time, in whole blocks


@dataclass(frozen=True, slots=True, eq=False)
class CodebookWeight:
    """A linear layer's weight as 4-bit places in a table, scaled block by block.

    With the weight's elements in row-major order, `W[i] = codebook[code[i]] * absmax[i // block]`.
    Blocks run on from one row to the next.

    Args:
        packed: uint8 `[ceil(out * in / 2)]`, two codes a byte, the first in the high bits.
        codebook: float32 `[16]`.
        absmax: float32, one per block.
        block_size: elements that share a scale; even.
        shape: `(out, in)`.
        label: name of the table, such as `nf4`.
    """

    packed: torch.Tensor
    codebook: torch.Tensor
    absmax: torch.Tensor
    block_size: int
    shape: tuple[int, int]
    label: str

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.shape[0]

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the dense weight `[out, in]`: computed in float32, then cast to `dtype`."""
        size = self.out_features * self.in_features
        weight = torch.empty(size, dtype=dtype)
        step = max(1, _PIECE // self.block_size)  # blocks
        for block in range(0, self.absmax.numel(), step):
            begin, end = block * self.block_size, min((block + step) * self.block_size, size)
            packed = self.packed[begin // 2 : (end + 1) // 2]
            codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()[: end - begin]
            scales = self.absmax[block : block + step].repeat_interleave(self.block_size)
            weight[begin:end] = self.codebook[codes.int()] * scales[: end - begin]
        return weight.view(self.shape)
