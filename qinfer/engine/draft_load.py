"""Putting the drafter of an engine together: prompt lookup, or a second, smaller model.

A draft model's files are checked before the target's weights are read, so that a model that cannot
draft for it is refused at once.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from qinfer.checkpoint.reader import Checkpoint, open_checkpoint
from qinfer.engine.admission import Limits
from qinfer.engine.blocks import BlockManager
from qinfer.engine.config import EngineConfig, resolve
from qinfer.engine.draft_model import ModelDrafter
from qinfer.engine.drafting import NgramDrafter
from qinfer.engine.memory import cache_layout, step_memory
from qinfer.engine.runner import Runner
from qinfer.engine.sampler import Sampler
from qinfer.engine.speculation import Speculator
from qinfer.errors import ConfigError
from qinfer.kvcache.layout import KVLayout
from qinfer.kvcache.pool import KVPool
from qinfer.models.causal_lm import CausalLM
from qinfer.models.config import ModelConfig
from qinfer.models.native_load import LoadOptions, load_model
from qinfer.models.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model that was opened and fits the target; its weights are not read yet.

    Args:
        checkpoint: its files, opened.
        model_config: its facts.
        config: the engine's settings, resolved for it.
    """

    checkpoint: Checkpoint
    model_config: ModelConfig
    config: EngineConfig

    def load(self) -> "LoadedDraft":
        """Read the weights.

        Raises:
            CheckpointError: tensors are missing or damaged.
        """
        config = self.config
        decoder = load_model(
            self.checkpoint,
            load_options(config),
        )
        layout = cache_layout(self.model_config, config)
        return LoadedDraft(decoder, layout, step_memory(decoder, config))


def load_options(config: EngineConfig) -> LoadOptions:
    """Return how a model is loaded, target or draft, with resolved settings."""
    return LoadOptions(
        dtype=config.dtype,
        device=config.device,
        max_positions=config.max_model_len,
        threads=config.threads or 1,
        activations=config.activations,
        lm_head=config.lm_head,
    )


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model with its weights.

    Args:
        decoder: its layers.
        layout: of its cache.
        step_bytes: predicted memory of its largest step.
    """

    decoder: CausalLM
    layout: KVLayout
    step_bytes: int


def open_draft(
    path: Path, config: EngineConfig, target: ModelConfig, tokenizer: Tokenizer
) -> DraftModel:
    """Open a draft model and make sure that it can draft for a target.

    Its weights and its cache keep the types that it was made for, whatever the target's are.

    Args:
        path: of its files.
        config: the target's settings, resolved.
        target: the target's facts.
        tokenizer: the target's.

    Raises:
        ConfigError: its tokens are not the target's.
        CheckpointError: it is missing or damaged.
    """
    checkpoint = open_checkpoint(path)
    model_config = ModelConfig.from_dict(checkpoint.config)
    if model_config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model {path} has {model_config.vocab_size} tokens and the model "
            f"{target.vocab_size}; a draft model must share the model's tokenizer"
        )
    _check_tokens(path, load_tokenizer(path), tokenizer)
    length = min(config.max_model_len or model_config.max_position, model_config.max_position)
    wanted = replace(config, dtype="auto", kv_cache_dtype="auto", max_model_len=length)
    resolved = resolve(
        wanted,
        model_config,
        recorded_kv=checkpoint.kv_scheme,
        has_cuda=config.device == "cuda",
        num_cores=config.threads or 1,
    )
    return DraftModel(checkpoint, model_config, resolved)


def make_speculator(
    config: EngineConfig,
    draft: LoadedDraft | None,
    num_blocks: int,
    tokenizer: Tokenizer,
    limits: Limits,
) -> Speculator | None:
    """Return what drafts for an engine, or None if nothing does.

    Args:
        config: the engine's final settings.
        draft: the draft model, where `speculative` names one.
        num_blocks: cache blocks of the draft model, as many as the target has.
        tokenizer: of both.
        limits: of the engine.
    """
    if config.speculative is None:
        return None
    if draft is None:
        return Speculator(NgramDrafter(), config.num_speculative_tokens)
    threads = config.threads or 1
    sampler = Sampler(
        tokenizer, vocab_size=limits.vocab_size, eos_ids=limits.eos_ids, threads=threads
    )
    blocks = BlockManager(
        num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
    )
    pool = KVPool(draft.layout, num_blocks, config.device)
    drafter = ModelDrafter(
        Runner(draft.decoder, pool, num_threads=threads),
        blocks,
        sampler,
        max_batch_tokens=config.max_num_batched_tokens,
        max_positions=draft.decoder.max_positions,
        device=config.device,
    )
    return Speculator(drafter, config.num_speculative_tokens)


def _check_tokens(path: Path, draft: Tokenizer, target: Tokenizer) -> None:
    """Refuse a draft model whose ids mean other tokens than the target's.

    Raises:
        ConfigError: names the first such id.
    """
    for token_id in range(max(draft.vocab_size, target.vocab_size)):
        ours, theirs = target.token_bytes(token_id), draft.token_bytes(token_id)
        if ours != theirs:
            raise ConfigError(
                f"the draft model {path} has another tokenizer: token {token_id} is {theirs!r}, "
                f"but {ours!r} in the model; a draft model must share the model's tokenizer"
            )
