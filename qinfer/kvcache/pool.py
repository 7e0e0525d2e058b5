"""The memory of the paged cache: allocated once, written and read by block."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from qinfer.kernels.reference import TORCH_KV_DTYPES
from qinfer.kernels.spec import PagedKV
from qinfer.kvcache.layout import KVLayout

_CACHE_LINE = 64


class KVPool:
    """Blocks of keys and values for every layer, zero at first.

    Who owns a block is the block manager's business; the pool only holds the bytes. Copying a
    block copies its scales with its codes.

    Args:
        layout: shape and storage.
        num_blocks: blocks that all sequences share.
        device: where they live.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._layers = [self._allocate(device) for _ in range(layout.num_layers)]

    def _allocate(self, device: str) -> PagedKV:
        layout = self.layout
        shape = (self.num_blocks, layout.block_size, layout.num_kv_heads)
        dtype = TORCH_KV_DTYPES[layout.scheme.dtype]
        if dtype == torch.float8_e4m3fn:
            dtype = torch.uint8  # indexing knows no FP8
        scaled = layout.scheme.quantized
        return PagedKV(
            k=_zeros((*shape, layout.head_dim), dtype, device),
            v=_zeros((*shape, layout.head_dim), dtype, device),
            k_scales=_zeros(shape, torch.bfloat16, device) if scaled else None,
            v_scales=_zeros(shape, torch.bfloat16, device) if scaled else None,
        )

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all blocks, scales included."""
        return self.num_blocks * self.layout.block_bytes

    def layer(self, index: int) -> PagedKV:
        """Return the storage of decoder layer `index`."""
        return self._layers[index]

    def copy_block(self, source: int, target: int) -> None:
        """Copy codes and scales of one block to another, in every layer."""
        for layer in self._layers:
            for tensor in _tensors(layer):
                tensor[target] = tensor[source]

    def snapshot(self, block_ids: Sequence[int]) -> list[torch.Tensor]:
        """Return copies of everything stored in `block_ids`, layer by layer."""
        return [tensor[list(block_ids)] for layer in self._layers for tensor in _tensors(layer)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return zeros; on the CPU in pages that become resident when they are first written.

    numpy asks the system for zeroed pages, where torch would write every byte: a pool for many
    long sequences then costs what is in it. The first element begins a cache line, so that no key
    of 64 bytes lies in two of them.
    """
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    room = np.zeros(num_bytes + _CACHE_LINE, dtype=np.uint8)
    start = -room.ctypes.data % _CACHE_LINE
    return torch.from_numpy(room[start : start + num_bytes]).view(dtype).view(shape)


def _tensors(layer: PagedKV) -> list[torch.Tensor]:
    parts = (layer.k, layer.v, layer.k_scales, layer.v_scales)
    return [tensor for tensor in parts if tensor is not None]
