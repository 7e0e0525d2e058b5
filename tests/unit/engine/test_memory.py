from dataclasses import replace

import pytest
from support.checkpoints import TINY

from qinfer.engine.config import EngineConfig
from qinfer.engine.memory import activation_bytes, check_weights_fit, plan_pool, with_plan
from qinfer.errors import CapacityError
from qinfer.kvcache.layout import KVLayout
from qinfer.models.config import ModelConfig
from qinfer.schemes import KV_SCHEMES

MODEL = ModelConfig.from_dict(
    {**TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"}
)
LAYOUT = KVLayout(2, 2, 16, KV_SCHEMES["fp32"], 16)  # 512 bytes per token, 8 KiB per block
CONFIG = EngineConfig(device="cpu", max_model_len=128, max_num_seqs=4)
MIB = 1 << 20


def plan(config: EngineConfig = CONFIG, *, free: int = 1 << 30, given: bool = False):
    return plan_pool(
        config,
        LAYOUT,
        weights_bytes=MIB,
        activations=MIB,
        free_bytes=free,
        max_len_given=given,
    )


def test_without_a_limit_the_pool_holds_all_sequences() -> None:
    assert plan().num_blocks == 4 * 8
    assert plan().max_model_len == 128


def test_at_most_half_of_what_is_free() -> None:
    result = plan(free=2 * MIB + 2 * 10 * LAYOUT.block_bytes)
    assert (result.num_blocks, result.max_model_len) == (10, 128)


def test_a_limit_is_for_weights_activations_and_cache_together() -> None:
    config = replace(CONFIG, memory=2 * MIB + 9 * LAYOUT.block_bytes + 5)
    assert plan(config).num_blocks == 9


def test_the_context_shrinks_unless_it_was_asked_for() -> None:
    config = replace(CONFIG, memory=2 * MIB + 3 * LAYOUT.block_bytes)
    result = plan(config)
    assert (result.num_blocks, result.max_model_len) == (3, 48)
    assert with_plan(config, result).max_model_len == 48
    with pytest.raises(CapacityError, match="one sequence of 128 tokens"):
        plan(config, given=True)


def test_what_does_not_fit_is_said_with_figures_and_a_way_out() -> None:
    """L05: how much is needed, how much there is, and which option helps."""
    with pytest.raises(CapacityError) as error:
        plan(replace(CONFIG, memory="2MiB"))
    message = str(error.value)
    for part in (
        "weights 1.0 MiB",
        "cache 8.0 KiB",
        "memory=2MiB",
        "raise memory",
        "kv_cache_dtype",
    ):
        assert part in message


def test_weights_that_can_not_fit_are_refused_before_loading() -> None:
    """L05."""
    check_weights_fit(CONFIG, 100, 100)
    with pytest.raises(CapacityError, match=r"weights alone take 269\.0 MiB, but only 64\.0 MiB"):
        check_weights_fit(replace(CONFIG, memory="64MiB"), 269 * MIB, 1 << 40)
    with pytest.raises(CapacityError, match="is free"):
        check_weights_fit(CONFIG, 269 * MIB, 64 * MIB)


def test_activations_grow_with_tokens_and_rows() -> None:
    def estimate(tokens: int, seqs: int) -> int:
        return activation_bytes(MODEL, "float32", max_num_batched_tokens=tokens, max_num_seqs=seqs)

    assert estimate(1024, 4) > estimate(512, 4)
    assert estimate(512, 256) - estimate(512, 4) == 2 * 4 * 288 * (256 - 128)
