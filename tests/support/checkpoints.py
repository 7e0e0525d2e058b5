"""Real checkpoints for tests, written in about a second the way Hugging Face writes them.

`write_tiny` makes a small random model of any supported family; transformers is the oracle for
what it computes. `write_script` makes a model whose logits are known in advance.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from support.tokenizers import EOS, FIRST_ALIAS, IM_END, PAD, byte_level, write_tokenizer

TINY: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

_FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}
# What the families with experts have beside TINY: layer 0 of qwen3_moe stays dense.
_MOE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
}


def write_tiny(
    path: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of `family` into `path` and return the path.

    `overrides` replace fields of the transformers config (`TINY` by default). Norm weights and
    biases are random too, so that a test notices when one is ignored.
    """
    settings = TINY | _MOE.get(family, {}) | overrides
    if family == "mistral":
        settings.setdefault("sliding_window", None)
    config_class, model_class = _FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = model_class(config_class(**settings))
        _randomize_vectors(model)
    save_model(model.to(dtype), path, max_shard_size=max_shard_size)
    return path


def write_script(
    path: Path,
    script: str | bytes | Sequence[int] | Mapping[int, Mapping[int, float]],
    *,
    factor: float = 1.0,
    vocab_size: int = 288,
    max_position: int = 512,
    dtype: torch.dtype = torch.float32,
) -> list[int]:
    """Write a model whose greedy output is `script`, then EOS; return the scripted ids.

    Text or bytes: one token per byte (an alias id where a byte comes again). Every token that the
    script does not use starts it, EOS too, so any prompt that ends in such a token is answered by
    the script. Logits after token t are `factor * sqrt(vocab_size)` for its successor, 0 elsewhere.

    A mapping gives logits outright: `{token: {next: logit}}`; a token without a row starts the
    first row's token. Then the returned list is empty.

    The embedding is the identity and `o_proj` and `down_proj` are zero, so the last norm sees a
    one-hot vector; q, k and v are random, so that the cache is written and read all the same.
    """
    aliases: list[int] = []
    if isinstance(script, Mapping):
        ids: list[int] = []
        rows = _complete(script, factor * math.sqrt(vocab_size), vocab_size)
    else:
        ids, aliases = _script_ids(script, vocab_size)
        rows = _script_rows(ids, factor * math.sqrt(vocab_size), vocab_size)
    _save_script_model(rows, path, vocab_size, max_position, dtype)
    write_tokenizer(path, byte_level(aliases))
    return ids


def save_model(
    model: transformers.PreTrainedModel, path: Path, *, max_shard_size: str = "5GB"
) -> None:
    """Write a transformers model with a byte tokenizer, chat template and generation config."""
    model.save_pretrained(path, max_shard_size=max_shard_size)
    write_tokenizer(path)
    generation = {"bos_token_id": 256, "eos_token_id": [EOS, IM_END], "pad_token_id": PAD}
    (path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    """Replace top-level keys of a JSON file; a value of None removes the key."""
    data = json.loads(path.read_text(encoding="utf-8")) | changes
    data = {key: value for key, value in data.items() if value is not None}
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")


def load_oracle(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a checkpoint in transformers, in eager attention, ready to compare logits with."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    )
    return model.eval()


def _randomize_vectors(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            elif parameter.dim() == 1:
                parameter.normal_(1.0, 0.1)


def _script_ids(
    script: str | bytes | Sequence[int], vocab_size: int
) -> tuple[list[int], list[int]]:
    if isinstance(script, str):
        script = script.encode()
    if not isinstance(script, bytes):
        return list(script), []
    ids: list[int] = []
    aliases: list[int] = []
    for value in script:
        if value in ids:
            ids.append(FIRST_ALIAS + len(aliases))
            aliases.append(value)
        else:
            ids.append(value)
    if FIRST_ALIAS + len(aliases) > vocab_size:
        raise ValueError(f"the script repeats {len(aliases)} bytes; pass a larger vocab_size")
    return ids, aliases


def _script_rows(ids: list[int], logit: float, vocab_size: int) -> dict[int, dict[int, float]]:
    rows = {token: {ids[0]: logit} for token in range(vocab_size)}
    for token, following in zip(ids, [*ids[1:], EOS], strict=True):
        rows[token] = {following: logit}
    return rows


def _complete(
    table: Mapping[int, Mapping[int, float]], logit: float, vocab_size: int
) -> dict[int, dict[int, float]]:
    start = next(iter(table))
    return {token: dict(table.get(token, {start: logit})) for token in range(vocab_size)}


def _save_script_model(
    rows: Mapping[int, Mapping[int, float]],
    path: Path,
    vocab_size: int,
    max_position: int,
    dtype: torch.dtype,
) -> None:
    settings = TINY | {
        "vocab_size": vocab_size,
        "hidden_size": vocab_size,
        "head_dim": vocab_size // 4,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-12,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size))
        model.lm_head.weight.zero_()
        for token, row in rows.items():
            for following, logit in row.items():
                model.lm_head.weight[following, token] = logit / math.sqrt(vocab_size)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    save_model(model.to(dtype), path)
    edit_json(path / "generation_config.json", eos_token_id=EOS)
