"""The pool's bytes equal the layout's formula; copies carry the scales."""

import resource
from pathlib import Path

import pytest
import torch

from qinfer.kvcache.layout import KVLayout
from qinfer.kvcache.pool import KVPool
from qinfer.schemes import KV_SCHEMES


@pytest.mark.parametrize("kv", KV_SCHEMES)
@pytest.mark.parametrize("head_dim", [64, 36])
def test_m01_allocated_bytes_are_those_of_the_formula(kv: str, head_dim: int) -> None:
    layout = KVLayout(3, 2, head_dim, KV_SCHEMES[kv])
    pool = KVPool(layout, 5)
    real = sum(tensor.nbytes for tensor in pool.snapshot(range(5)))
    assert real == pool.allocated_bytes == 5 * layout.block_bytes


@pytest.mark.parametrize("kv", KV_SCHEMES)
def test_copies_carry_codes_and_scales_of_every_layer(kv: str) -> None:
    pool = KVPool(KVLayout(2, 2, 8, KV_SCHEMES[kv]), 3)
    for index in range(2):
        layer = pool.layer(index)
        layer.k[1].fill_(3 + index)
        layer.v[1].fill_(5 + index)
        if layer.k_scales is not None and layer.v_scales is not None:
            layer.k_scales[1].fill_(0.25)
            layer.v_scales[1].fill_(0.5)
    pool.copy_block(1, 2)
    for copy, original in zip(pool.snapshot([2]), pool.snapshot([1]), strict=True):
        assert torch.equal(copy, original)
        assert (copy != 0).all()
    assert all((part == 0).all() for part in pool.snapshot([0]))


def test_k10_a_large_pool_costs_what_is_written_to_it() -> None:
    before = resident_bytes()
    pool = KVPool(KVLayout(2, 8, 128, KV_SCHEMES["int8"]), 8192)  # over 500 MB
    assert pool.allocated_bytes > 500e6
    pool.layer(0).k[17].fill_(1)
    assert resident_bytes() - before < 100e6


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()
