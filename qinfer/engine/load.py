"""From MODEL and options to a ready engine: each part made once, in order, from final settings."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qinfer import host
from qinfer.checkpoint.hub import resolve_model
from qinfer.checkpoint.reader import Checkpoint, open_checkpoint
from qinfer.engine.admission import Limits, eos_ids, sampling_defaults
from qinfer.engine.blocks import BlockManager
from qinfer.engine.config import NGRAM, EngineConfig, resolve
from qinfer.engine.core import EngineCore
from qinfer.engine.draft_load import (
    DraftModel,
    LoadedDraft,
    load_options,
    make_speculator,
    open_draft,
)
from qinfer.engine.memory import (
    DeviceMemory,
    cache_layout,
    check_weights_fit,
    max_logit_rows,
    plan_pool,
    step_memory,
    with_plan,
)
from qinfer.engine.params import SamplingDefaults
from qinfer.engine.runner import Runner
from qinfer.engine.scheduler import Scheduler
from qinfer.engine.static import StaticScheduler
from qinfer.formats.kv_scales import is_kv_scale
from qinfer.kernels.spec import KERNEL_DEVICES
from qinfer.kvcache.pool import KVPool
from qinfer.models.causal_lm import CausalLM
from qinfer.models.config import ModelConfig
from qinfer.models.load import loaded_bytes
from qinfer.models.native_load import load_model
from qinfer.models.tokenizer import Tokenizer, load_tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model comes from and how it is read.

    Args:
        revision: branch, tag or commit of a hub model; None = its default.
        token: for gated hub models; None = the hub client's own.
        chat_template: Jinja source that replaces the model's.
        allow_pickle: read `.bin` files where there are no safetensors, tensors only.
        on_load: called with the layers loaded and their number.
    """

    revision: str | None = None
    token: str | None = None
    chat_template: str | None = None
    allow_pickle: bool = False
    on_load: Callable[[int, int], None] | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything that makes one engine; two of them share nothing.

    `activation_bytes` is the predicted memory of a full step, see `MemoryReport`; `draft` the
    draft model, if there is one.
    """

    config: EngineConfig
    model_config: ModelConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    decoder: CausalLM
    pool: KVPool
    core: EngineCore
    activation_bytes: int
    draft: LoadedDraft | None = None

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft model's weights and cache."""
        if self.draft is None:
            return 0
        return (
            self.draft.decoder.memory_bytes + self.pool.num_blocks * self.draft.layout.block_bytes
        )


def load_engine(model: str | Path, config: EngineConfig, source: Source) -> Engine:
    """Load a model and make its engine.

    Args:
        model: directory, hub id or `.gguf` file.
        config: the settings as the user gave them.
        source: how the model is found and read.

    Raises:
        ConfigError: settings that cannot work with this model or machine.
        CheckpointError: the model is missing or damaged.
        CapacityError: it does not fit into memory.
    """
    path = resolve_model(
        model,
        revision=source.revision,
        token=source.token,
        gguf_weights=config.gguf_weights,
    )
    checkpoint = open_checkpoint(path, allow_pickle=source.allow_pickle)
    model_config = ModelConfig.from_dict(checkpoint.config)
    resolved = resolve(
        config,
        model_config,
        recorded_kv=checkpoint.kv_scheme,
        has_cuda=_has_cuda(),
        num_cores=host.num_cores(),
    )
    _report_static_scales(checkpoint, resolved)
    tokenizer = load_tokenizer(path, chat_template=source.chat_template)
    opened = _open_draft(resolved, model_config, tokenizer, source)
    total_bytes = loaded_bytes(checkpoint, model_config, resolved.dtype)
    if opened:
        total_bytes += loaded_bytes(opened.checkpoint, opened.model_config, opened.config.dtype)
    check_weights_fit(resolved, total_bytes, _device_memory(resolved))
    decoder = load_model(
        checkpoint,
        replace(load_options(resolved), progress=source.on_load),
    )
    _set_threads(resolved, decoder)
    layout = cache_layout(model_config, resolved)
    draft = opened.load() if opened else None
    activations = step_memory(decoder, resolved) + (draft.step_bytes if draft else 0)
    weights = decoder.memory_bytes + (draft.decoder.memory_bytes if draft else 0)
    plan = plan_pool(
        resolved,
        layout,
        weights_bytes=weights,
        activations=activations,
        memory=_device_memory(resolved),
        max_len_given=config.max_model_len is not None,
        draft_block_bytes=draft.layout.block_bytes if draft else 0,
    )
    final = with_plan(resolved, plan)
    pool = KVPool(layout, plan.num_blocks, final.device)
    limits = _limits(checkpoint, model_config, tokenizer, plan.max_model_len)
    core = EngineCore(
        Runner(decoder, pool, num_threads=final.threads or 1),
        make_scheduler(final, plan.num_blocks, cache_key=_cache_key(path, final)),
        tokenizer,
        limits,
        seed=final.seed,
        device=final.device,
        speculator=make_speculator(final, draft, plan.num_blocks, tokenizer, limits),
    )
    return Engine(
        final, model_config, checkpoint, tokenizer, decoder, pool, core, activations, draft
    )


def _open_draft(
    config: EngineConfig, target: ModelConfig, tokenizer: Tokenizer, source: Source
) -> DraftModel | None:
    """Open the draft model that the settings name, if they do."""
    if config.speculative is None or config.speculative == NGRAM:
        return None
    path = resolve_model(config.speculative, token=source.token, gguf_weights=config.gguf_weights)
    return open_draft(path, config, target, tokenizer)


def make_scheduler(config: EngineConfig, num_blocks: int, *, cache_key: str) -> Scheduler:
    """Return the scheduler of resolved settings, over a pool of `num_blocks`.

    Args:
        config: its settings.
        num_blocks: cache blocks.
        cache_key: what the cache's content depends on beside the tokens.
    """
    blocks = BlockManager(
        num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        cache_key=cache_key,
    )
    sizes: dict[str, Any] = {
        "max_batch_tokens": config.max_num_batched_tokens,
        "max_running": config.max_num_seqs,
        "max_logit_rows": max_logit_rows(config.max_num_seqs),
        "max_queue": config.max_queue,
    }
    if config.batching == "static":
        return StaticScheduler(blocks, **sizes)
    return Scheduler(blocks, **sizes, max_mixed_tokens=config.max_num_mixed_tokens)


def _limits(
    checkpoint: Checkpoint, model: ModelConfig, tokenizer: Tokenizer, max_model_len: int
) -> Limits:
    generation = checkpoint.generation_config
    defaults = sampling_defaults(generation)
    if defaults != SamplingDefaults():
        _log.info("sampling defaults from generation_config.json: %s", defaults)
    declared = generation.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    return Limits(
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_ids=_known_ids(eos_ids(declared, tokenizer.eos_token_id), model.vocab_size),
        defaults=defaults,
    )


def _report_static_scales(checkpoint: Checkpoint, config: EngineConfig) -> None:
    """Tell that a checkpoint's static scales do not decide how the cache is stored.

    A checkpoint that records qinfer's own scheme has them for other engines: nothing to tell.
    """
    if checkpoint.kv_scheme is None and any(is_kv_scale(name) for name in checkpoint.entries):
        _log.warning(
            "%s holds static scales of the KV cache, which are not used: a quantized cache here "
            "has a scale for every token and head; it is stored as %s (--kv-cache-dtype)",
            checkpoint.path,
            config.kv_cache_dtype,
        )


def _known_ids(ids: frozenset[int], vocab_size: int) -> frozenset[int]:
    """Return the ids that the model has; others, which it can never give, are reported."""
    unknown = sorted(token for token in ids if not 0 <= token < vocab_size)
    if unknown:
        _log.warning("end tokens %s are outside the vocabulary of %d", unknown, vocab_size)
    return ids.difference(unknown)


def _has_cuda() -> bool:
    """Tell whether a GPU can be used; one that cannot is reported."""
    if not torch.cuda.is_available():
        return False
    if "cuda" not in KERNEL_DEVICES:
        _log.warning("there is a GPU, but this version has kernels for %s only", KERNEL_DEVICES)
        return False
    return True


def _cache_key(path: Path, config: EngineConfig) -> str:
    """Return what the cache's content depends on beside the tokens: the model and its numerics."""
    return f"{path} {config.dtype} {config.kv_cache_dtype} {config.activations}"


def _device_memory(config: EngineConfig) -> DeviceMemory:
    if config.device == "cpu":
        return DeviceMemory(host.available_memory(), host.total_memory())
    return DeviceMemory(*torch.cuda.mem_get_info())


def _set_threads(config: EngineConfig, decoder: CausalLM) -> None:
    """Give torch the threads; a process-wide setting, on which no result depends.

    Where torch does not compute the layers it gets one: its idle threads spin for a while, and
    would take the cores from those that do.
    """
    threads = (config.threads or 1) if decoder.uses_torch else 1
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
