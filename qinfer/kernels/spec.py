"""Descriptions of layers, from which a kernel is chosen once, when the layer is loaded."""

from dataclasses import dataclass

import torch

from qinfer.schemes import KVScheme, WeightScheme

# Devices for which there is a kernel of every kind of layer.
KERNEL_DEVICES = ("cpu",)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A linear layer `y = x @ W.T` as a kernel sees it.

    Args:
        in_features: columns of W.
        out_features: rows of W.
        dtype: type of the activations, and of W where it is dense.
        device: `cpu` or `cuda`.
        scheme: how W is quantized; None = dense.
        scattered_groups: the group of a column is not `k // group_size`.
    """

    in_features: int
    out_features: int
    dtype: torch.dtype
    device: str
    scheme: WeightScheme | None = None
    scattered_groups: bool = False


@dataclass(frozen=True, slots=True)
class AttnSpec:
    """Causal attention over the paged cache as a kernel sees it.

    Args:
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`.
        head_dim: elements per head.
        block_size: tokens per cache block.
        kv: how K and V are stored.
        dtype: type of queries and output.
        device: `cpu` or `cuda`.
        sliding_window: tokens a query may see, itself included; None = all before it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv: KVScheme
    dtype: torch.dtype
    device: str
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """One layer's keys and values in the cache.

    Args:
        k: `[blocks, block_size, kv_heads, head_dim]`; FP8 is held as uint8 bits.
        v: the same.
        k_scales: bf16 `[blocks, block_size, kv_heads]`, or None if the elements need none.
        v_scales: the same.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None
