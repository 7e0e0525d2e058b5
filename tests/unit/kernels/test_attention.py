"""Paged attention against a dense formula in float64, for every cache type and odd shapes."""

import math

import pytest
import torch

from qinfer.errors import ConfigError
from qinfer.kernels.attention import KV_TILE, choose_attention
from qinfer.kernels.reference import dequantize_kv, quantize_kv
from qinfer.kernels.spec import AttnSpec, PagedKV
from qinfer.kvcache.layout import KVLayout
from qinfer.kvcache.pool import KVPool
from qinfer.schemes import KV_SCHEMES


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, window: int | None
) -> torch.Tensor:
    """Literal softmax attention; query `i` stands at position `first + i`."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(q.shape[0]):
        position = first + row
        begin = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            keys = k[begin : position + 1, head // group].double()
            scores = keys @ q[row, head].double() / math.sqrt(q.shape[2])
            values = v[begin : position + 1, head // group].double()
            out[row, head] = scores.softmax(0) @ values
    return out


def spec_of(**changes: object) -> AttnSpec:
    settings: dict[str, object] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "block_size": 16,
        "kv": KV_SCHEMES["fp32"],
        "dtype": torch.float32,
        "device": "cpu",
    }
    return AttnSpec(**(settings | changes))  # type: ignore[arg-type] # a test's shorthand


def attend(
    spec: AttnSpec, length: int, num_queries: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with the last queries of one sequence in scattered blocks; return ours and dense."""
    generator = torch.Generator().manual_seed(seed)
    shape = (length, spec.num_kv_heads, spec.head_dim)
    k, v = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    q = torch.randn(num_queries, spec.num_heads, spec.head_dim, generator=generator)
    layout = KVLayout(1, spec.num_kv_heads, spec.head_dim, spec.kv, spec.block_size)
    pool = KVPool(layout, 2 * layout.num_blocks(length) + 1)
    table = torch.randperm(pool.num_blocks, generator=generator)[: layout.num_blocks(length)]
    positions = torch.arange(length)
    slots = table[positions // spec.block_size] * spec.block_size + positions % spec.block_size
    kernel = choose_attention(spec).implementation.prepare(spec)
    kernel.store(k, v, pool.layer(0), slots)
    plan = kernel.plan(table[None], torch.tensor([length]), torch.tensor([0, num_queries]))
    ours = kernel.run(q, pool.layer(0), plan)
    seen_k = dequantize_kv(*quantize_kv(k, spec.kv))
    seen_v = dequantize_kv(*quantize_kv(v, spec.kv))
    dense = dense_attention(q, seen_k, seen_v, length - num_queries, spec.sliding_window)
    return ours, dense.flatten(1)


@pytest.mark.parametrize("kv", KV_SCHEMES)
@pytest.mark.parametrize("head_dim", [16, 36, 64, 80, 96, 100, 128])
def test_k11_every_head_size_and_cache_type(head_dim: int, kv: str) -> None:
    ours, dense = attend(spec_of(head_dim=head_dim, kv=KV_SCHEMES[kv]), 37, 21)
    assert (ours - dense).abs().max() < 1e-5


@pytest.mark.parametrize("length", [1, 16, 17, KV_TILE, KV_TILE + 1, 2 * KV_TILE + 40])
@pytest.mark.parametrize("num_queries", [1, 16, 50])
@pytest.mark.parametrize("window", [None, 1, 20, 200])
def test_lengths_chunks_and_windows(length: int, num_queries: int, window: int | None) -> None:
    spec = spec_of(sliding_window=window, kv=KV_SCHEMES["int8"])
    ours, dense = attend(spec, length, min(num_queries, length))
    assert (ours - dense).abs().max() < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (8, 1), (3, 3)])
@pytest.mark.parametrize("block_size", [8, 32, 128])
def test_head_groups_and_block_sizes(heads: int, kv_heads: int, block_size: int) -> None:
    spec = spec_of(num_heads=heads, num_kv_heads=kv_heads, block_size=block_size)
    ours, dense = attend(spec, 150, 3)
    assert (ours - dense).abs().max() < 1e-5


def test_k17_scales_of_k_and_v_are_not_swapped() -> None:
    spec = spec_of(kv=KV_SCHEMES["int8"])
    kernel = choose_attention(spec).implementation.prepare(spec)
    pool = KVPool(KVLayout(1, 2, 16, spec.kv), 1)
    k, v = torch.full((1, 2, 16), 0.1), torch.full((1, 2, 16), 10.0)
    kernel.store(k, v, pool.layer(0), torch.tensor([0]))
    cache: PagedKV = pool.layer(0)
    assert cache.k_scales is not None
    assert cache.v_scales is not None
    assert cache.v_scales[0, 0, 0] > 90 * cache.k_scales[0, 0, 0]
    plan = kernel.plan(torch.tensor([[0]]), torch.tensor([1]), torch.tensor([0, 1]))
    out = kernel.run(torch.ones(1, 4, 16), cache, plan)
    assert torch.allclose(out, torch.full_like(out, 10.0), rtol=1e-2)


def test_what_it_cannot_run_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="5 query heads are no multiple of 2 kv heads"):
        choose_attention(spec_of(num_heads=5))
    with pytest.raises(ConfigError, match="block size 48 does not divide 128"):
        choose_attention(spec_of(block_size=48))
