from dataclasses import replace

import pytest
from support.checkpoints import TINY

from qinfer.engine.config import EngineConfig
from qinfer.engine.memory import (
    DeviceMemory,
    MemoryReport,
    activation_bytes,
    capacity_line,
    check_weights_fit,
    max_logit_rows,
    plan_pool,
    with_plan,
)
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


def plan(
    config: EngineConfig = CONFIG, *, free: int = 1 << 30, total: int = 1 << 31, given: bool = False
):
    return plan_pool(
        config,
        LAYOUT,
        weights_bytes=MIB,
        activations=MIB,
        memory=DeviceMemory(free, total),
        max_len_given=given,
    )


def test_without_a_limit_the_pool_holds_all_sequences() -> None:
    assert plan().num_blocks == 4 * 8
    assert plan().max_model_len == 128


def test_a_draft_models_cache_has_as_many_blocks() -> None:
    config = replace(CONFIG, memory=2 * MIB + 9 * (LAYOUT.block_bytes + 1000))
    result = plan_pool(
        config,
        LAYOUT,
        weights_bytes=MIB,
        activations=MIB,
        memory=DeviceMemory(1 << 30, 1 << 31),
        max_len_given=False,
        draft_block_bytes=1000,
    )
    assert result.num_blocks == 9


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
    check_weights_fit(CONFIG, 100, DeviceMemory(100, 100))
    roomy = DeviceMemory(1 << 40, 1 << 40)
    with pytest.raises(CapacityError, match=r"weights alone take 269\.0 MiB, but only 64\.0 MiB"):
        check_weights_fit(replace(CONFIG, memory="64MiB"), 269 * MIB, roomy)
    with pytest.raises(CapacityError, match="is free"):
        check_weights_fit(CONFIG, 269 * MIB, DeviceMemory(64 * MIB, 1 << 40))
    with pytest.raises(CapacityError, match=r"memory_fraction=0\.25 of 400\.0 MiB allows"):
        check_weights_fit(
            replace(CONFIG, memory_fraction=0.25), 269 * MIB, DeviceMemory(0, 400 * MIB)
        )


def test_activations_grow_with_tokens_and_rows() -> None:
    def estimate(tokens: int, seqs: int) -> int:
        rows = max_logit_rows(seqs)
        return activation_bytes(MODEL, "float32", max_tokens=tokens, max_rows=rows)

    assert estimate(1024, 4) > estimate(512, 4)
    assert estimate(512, 256) - estimate(512, 4) == 2 * 4 * 288 * (256 - 128)


def test_activations_of_experts_add_their_inputs_outputs_and_sum() -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    names = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "dtype": "float32"}
    mixtral = ModelConfig.from_dict({**TINY, **experts, **names})
    sizes = [
        activation_bytes(model, "bfloat16", max_tokens=100, max_rows=1)
        for model in (MODEL, mixtral)
    ]
    assert sizes[1] - sizes[0] == 100 * 3 * 64 * 4


def test_a_fraction_is_of_all_the_memory_that_there_is() -> None:
    config = replace(CONFIG, memory_fraction=0.5)
    total = 2 * (2 * MIB + 9 * LAYOUT.block_bytes)
    assert plan(config, free=1, total=total).num_blocks == 9
    with pytest.raises(CapacityError, match=r"memory_fraction=0\.5 of 2\.0 MiB leaves 0\.0 KiB"):
        plan(config, total=2 * MIB)


def test_blocks_can_be_counted_out_exactly() -> None:
    config = replace(CONFIG, num_blocks=5)
    result = plan(config, free=MIB + 5 * LAYOUT.block_bytes)
    assert (result.num_blocks, result.max_model_len) == (5, 80)
    assert plan(replace(CONFIG, num_blocks=100)).num_blocks == 100  # more than 4 sequences need
    with pytest.raises(CapacityError, match="at most 4 blocks fit"):
        plan(config, free=MIB + 4 * LAYOUT.block_bytes)
    with pytest.raises(CapacityError, match="one sequence of 128 tokens"):
        plan(config, given=True)


def test_start_up_says_weights_cache_context_and_concurrency() -> None:
    report = MemoryReport(
        weights_bytes=134_500_000,
        checkpoint_bytes=0,
        kv_bytes_per_token=512,
        kv_allocated_bytes=512 * 320,
        kv_used_bytes=0,
        kv_peak_bytes=0,
        kv_capacity_tokens=320,
        activation_bytes=2_000_000,
        peak_rss_bytes=0,
    )
    assert capacity_line(report, replace(CONFIG, kv_cache_dtype="int8")) == (
        "weights 134.5 MB, int8 KV for 320 tokens, largest context 128, 4 requests at once (2 of "
        "them at full length), 2.0 MB for the activations of a step"
    )
