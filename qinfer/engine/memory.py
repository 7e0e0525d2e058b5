"""How the engine's memory is split: weights, cache, activations. Torch-free.

The planner, the allocator and the report use the same functions, so that what was predicted can
be held against what is there.
"""

from dataclasses import dataclass, replace
from typing import Protocol

from qinfer.engine.config import EngineConfig, parse_size
from qinfer.errors import CapacityError, ConfigError
from qinfer.kvcache.layout import KVLayout
from qinfer.models.config import ModelConfig
from qinfer.schemes import parse_kv_dtype

MAX_LOGIT_ROWS = 128
_FLOAT32_BYTES = 4
_KV_TILE = 128  # positions and tokens that attention works on at once (kernels.attention)
_QUERY_TILE = 16
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Where the bytes are; steady state beside peak.

    Args:
        weights_bytes: resident weights, as prepared for the kernels.
        checkpoint_bytes: the same tensors on disk.
        kv_bytes_per_token: cache bytes of one token over all layers, scales included.
        kv_allocated_bytes: the cache pool.
        kv_used_bytes: of it, held by running requests now.
        kv_peak_bytes: of it, held at the busiest moment so far.
        kv_capacity_tokens: tokens that fit into the pool.
        activation_bytes: predicted memory of a full step: activations, logits, index tensors.
        peak_rss_bytes: largest resident size of the process so far.
        draft_bytes: weights and cache of a draft model.
    """

    weights_bytes: int
    checkpoint_bytes: int
    kv_bytes_per_token: int
    kv_allocated_bytes: int
    kv_used_bytes: int
    kv_peak_bytes: int
    kv_capacity_tokens: int
    activation_bytes: int
    peak_rss_bytes: int
    draft_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device, as this process may have them.

    Args:
        free: what is left now.
        total: the most that there can be; on a CPU of the machine and of the control group.
    """

    free: int
    total: int


class SteppedModel(Protocol):
    """What is asked of a model about the memory of its steps; see `models.causal_lm`."""

    @property
    def config(self) -> ModelConfig:
        """The model's facts."""
        ...

    def step_bytes(self, layout: KVLayout, max_tokens: int, max_rows: int) -> int | None:
        """Return what steps of this size keep beside weights and cache; None = nothing."""
        ...


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The cache pool that was decided on, and the context that it allows."""

    num_blocks: int
    max_model_len: int


def cache_layout(model: ModelConfig, config: EngineConfig) -> KVLayout:
    """Return the shape of the cache for resolved settings."""
    return KVLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        scheme=parse_kv_dtype(config.kv_cache_dtype),
        block_size=config.block_size,
    )


def max_logit_rows(max_num_seqs: int) -> int:
    """Return the rows of logits of one step: all running requests, or a chunk of a scored one."""
    return max(MAX_LOGIT_ROWS, max_num_seqs)


def logits_bytes(model: ModelConfig, rows: int) -> int:
    """Return the bytes of `rows` rows of logits in float32."""
    return rows * model.vocab_size * _FLOAT32_BYTES


def activation_bytes(model: ModelConfig, dtype: str, *, max_tokens: int, max_rows: int) -> int:
    """Estimate the transient bytes of a step whose ops make their outputs anew.

    Per token: the residual stream and its normalized copy, q, k, v, gate, up and their product
    (of one expert at a time, with its inputs, its outputs and their sum); in float32 the scores
    against one KV tile, and the tile itself once per `_QUERY_TILE` tokens, each in a few copies.
    Per row of logits: float32, and their log-softmax for scored requests.
    """
    query = model.num_heads * model.head_dim
    key = model.num_kv_heads * model.head_dim
    inner = model.intermediate_size
    experts = 0
    if model.moe is not None:
        inner = max(inner, model.moe.intermediate_size)
        experts = 3 * model.hidden_size * _FLOAT32_BYTES
    elements = 3 * model.hidden_size + query + 2 * key + 3 * inner
    linear = elements * _DTYPE_BYTES[dtype] + experts
    scores = 4 * model.num_heads * _KV_TILE
    tile = 2 * 3 * key * _KV_TILE // _QUERY_TILE
    attention = (4 * query + 2 * key + scores + tile) * _FLOAT32_BYTES
    return max_tokens * (linear + attention) + 2 * logits_bytes(model, max_rows)


def step_memory(model: SteppedModel, config: EngineConfig) -> int:
    """Return the predicted bytes of a full step of resolved settings, beside weights and cache."""
    tokens = config.max_num_batched_tokens
    rows = min(max_logit_rows(config.max_num_seqs), tokens)
    kept = model.step_bytes(cache_layout(model.config, config), tokens, rows)
    if kept is not None:
        return kept + logits_bytes(model.config, rows)  # a copy for log-softmax or sampling
    return activation_bytes(model.config, config.dtype, max_tokens=tokens, max_rows=rows)


def check_weights_fit(config: EngineConfig, checkpoint_bytes: int, memory: DeviceMemory) -> None:
    """Refuse a model whose weights alone do not fit, before anything is loaded.

    Raises:
        CapacityError: says what is needed, what there is, and what helps.
    """
    limit = _limit(config, memory)
    available = memory.free if limit is None else limit
    if checkpoint_bytes > available:
        source = "is free" if limit is None else f"{_limit_name(config, memory)} allows"
        raise CapacityError(
            f"does not fit: the weights alone take {_gib(checkpoint_bytes)}, but only "
            f"{_gib(available)} {source}; quantize the model (qinfer quantize --weights int4), "
            "take a smaller one, or raise memory"
        )


def plan_pool(
    config: EngineConfig,
    layout: KVLayout,
    *,
    weights_bytes: int,
    activations: int,
    memory: DeviceMemory,
    max_len_given: bool,
    draft_block_bytes: int = 0,
) -> PoolPlan:
    """Decide the number of cache blocks, and shorten the context if it must be.

    With `num_blocks` set, the pool has that size. With `memory` or `memory_fraction` it gets what
    weights and activations leave of these. Else it is as large as `max_num_seqs` sequences of full
    length need, at most half of what is free on a CPU, whose memory other programs share, and at
    most nine tenths of it on a GPU.

    Args:
        config: resolved settings; `max_model_len` is what the model allows or the user wants.
        layout: the cache's sizes.
        weights_bytes: resident weights (loaded already).
        activations: see `activation_bytes`.
        memory: what the device has now, the weights being loaded.
        max_len_given: the user asked for this `max_model_len`, so it is not shortened.
        draft_block_bytes: of a draft model's cache, which has as many blocks; 0 = there is none.

    Raises:
        CapacityError: it does not fit; says what is needed, what there is, and what helps.
    """
    max_len = config.max_model_len
    if max_len is None:
        raise ConfigError("max_model_len must be resolved before the pool is planned")
    room, source = _room(config, memory, weights_bytes=weights_bytes, activations=activations)
    wanted = config.num_blocks or config.max_num_seqs * layout.num_blocks(max_len)
    block_bytes = layout.block_bytes + draft_block_bytes
    num_blocks = min(wanted, max(room, 0) // block_bytes)
    if config.num_blocks is not None and num_blocks < config.num_blocks:
        raise CapacityError(
            f"does not fit: num_blocks={config.num_blocks} of {_gib(block_bytes)} each are "
            f"{_gib(config.num_blocks * block_bytes)}, but {source} leaves "
            f"{_gib(max(room, 0))} for the cache; at most {num_blocks} blocks fit"
        )
    if num_blocks >= layout.num_blocks(max_len):
        return PoolPlan(num_blocks, max_len)
    if num_blocks and not max_len_given:
        return PoolPlan(num_blocks, num_blocks * layout.block_size)
    needed = layout.num_blocks(max_len if max_len_given else 1) * block_bytes
    raise CapacityError(
        f"does not fit: weights {_gib(weights_bytes)} + activations {_gib(activations)} + cache "
        f"{_gib(needed)} for one sequence of {max_len if max_len_given else layout.block_size} "
        f"tokens = {_gib(weights_bytes + activations + needed)}, but {source} leaves "
        f"{_gib(max(room, 0))} for the cache; raise memory, or lower max_model_len, "
        "max_num_batched_tokens or the bytes per token (kv_cache_dtype=int8)"
    )


def _limit(config: EngineConfig, memory: DeviceMemory) -> int | None:
    """Return the bytes that the user grants for everything; None = no limit was given."""
    if config.memory_fraction is not None:
        return int(config.memory_fraction * memory.total)
    return None if config.memory is None else parse_size(config.memory)


def _limit_name(config: EngineConfig, memory: DeviceMemory) -> str:
    if config.memory_fraction is None:
        return f"memory={config.memory}"
    return f"memory_fraction={config.memory_fraction:g} of {_gib(memory.total)}"


def _room(
    config: EngineConfig, memory: DeviceMemory, *, weights_bytes: int, activations: int
) -> tuple[int, str]:
    """Return the bytes for the cache, below zero if there are none, and where they come from."""
    limit = _limit(config, memory)
    if limit is not None:
        return limit - weights_bytes - activations, _limit_name(config, memory)
    share = 0.5 if config.device == "cpu" else 0.9
    if config.num_blocks is not None:
        share = 1.0
    source = f"{share:.0%} of the {_gib(memory.free)} that are free on the {config.device}"
    return int(memory.free * share) - activations, source


def capacity_line(report: MemoryReport, config: EngineConfig) -> str:
    """Return one line for start-up: weights, cache, largest context, and how many run at once.

    Args:
        report: of a loaded engine.
        config: its final settings.
    """
    context = config.max_model_len or report.kv_capacity_tokens
    full = min(report.kv_capacity_tokens // context, config.max_num_seqs)
    return (
        f"weights {_megabytes(report.weights_bytes)}, {config.kv_cache_dtype} KV for "
        f"{report.kv_capacity_tokens:,} tokens, largest context {context:,}, "
        f"{config.max_num_seqs} requests at once ({full} of them at full length), "
        f"{_megabytes(report.activation_bytes)} for the activations of a step"
    )


def with_plan(config: EngineConfig, plan: PoolPlan) -> EngineConfig:
    """Return the final settings: resolved ones with the context that the pool allows."""
    return replace(config, max_model_len=plan.max_model_len)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _gib(num_bytes: int) -> str:
    if num_bytes < 1 << 20:
        return f"{num_bytes / (1 << 10):.1f} KiB"
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / (1 << 30):.2f} GiB"
