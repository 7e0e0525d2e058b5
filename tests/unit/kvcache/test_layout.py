from dataclasses import replace

import pytest

from qinfer.kvcache.layout import KVLayout
from qinfer.schemes import KV_SCHEMES

# SmolLM2-135M: 30 layers, 9 query heads on 3 key/value heads of 64.
SMOLLM2 = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, scheme=KV_SCHEMES["fp16"])


@pytest.mark.parametrize(
    ("dtype", "bytes_per_token"),
    [("fp32", 46_080), ("fp16", 23_040), ("bf16", 23_040), ("fp8_e4m3", 11_880), ("int8", 11_880)],
)
def test_m01_bytes_per_token_count_kv_heads_and_scales(dtype: str, bytes_per_token: int) -> None:
    """M01: 69,120 for fp16 would be all query heads; 11,520 for int8 would forget the scales."""
    layout = replace(SMOLLM2, scheme=KV_SCHEMES[dtype])
    assert layout.bytes_per_token == bytes_per_token
    assert layout.block_bytes == 16 * bytes_per_token


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (8192, 512)])
def test_m01_tokens_are_rounded_up_to_blocks(tokens: int, blocks: int) -> None:
    assert SMOLLM2.num_blocks(tokens) == blocks


def test_more_layers_cost_in_proportion() -> None:
    """M01: the layer count of the config, not a constant."""
    twice = replace(SMOLLM2, num_layers=60)
    assert twice.bytes_per_token == 2 * SMOLLM2.bytes_per_token
