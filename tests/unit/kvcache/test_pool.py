"""The pool's bytes equal the layout's formula; copies carry the scales."""

import subprocess
import sys

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


def test_every_tensor_begins_a_cache_line() -> None:
    """Or each key of 64 bytes would lie in two of them."""
    pool = KVPool(KVLayout(5, 2, 64, KV_SCHEMES["int8"]), 4099)
    for index in range(5):
        layer = pool.layer(index)
        assert layer.k_scales is not None
        assert layer.v_scales is not None
        parts = (layer.k, layer.v, layer.k_scales, layer.v_scales)
        assert [part.data_ptr() % 64 for part in parts] == [0] * 4


GROWTH = """
import resource
from pathlib import Path
from qinfer.kvcache.layout import KVLayout
from qinfer.kvcache.pool import KVPool
from qinfer.schemes import KV_SCHEMES

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

before = resident()
pool = KVPool(KVLayout(2, 8, 128, KV_SCHEMES["int8"]), 8192)
pool.layer(0).k[17].fill_(1)
print(pool.allocated_bytes, resident() - before)
"""


def test_k10_a_large_pool_costs_what_is_written_to_it() -> None:
    """In a process of its own: what other tests do with memory says nothing about a pool."""
    run = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    allocated, growth = map(int, run.stdout.split())
    assert allocated > 500e6
    assert growth < 100e6
