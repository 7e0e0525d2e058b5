"""What the conditioner sees of a block, against transformers, and when `quantize` uses it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.checkpoints import load_oracle, write_tiny
from support.decoders import IDS, MOE_VARIANTS, VARIANTS
from support.outliers import plant_outliers

from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import ConfigError, UnsupportedModelError
from qinfer.models.config import ModelConfig
from qinfer.models.load import block_weights
from qinfer.quant.conditioner import (
    Conditioner,
    LayerConditioning,
    plan_conditioning,
    search_windows,
)
from qinfer.quant.conditioning import pair_sizes
from qinfer.schemes import KV_SCHEMES

INT8 = KV_SCHEMES["int8"]


def centred_log2(vectors: torch.Tensor, *, shared: bool) -> torch.Tensor:
    """Return log2 of the rms of every pair, less its mean, `[heads, pairs]`.

    Args:
        vectors: `[kv heads, tokens, dim]`; those of a group of query heads one after the other.
        shared: over all heads at once.
    """
    half = vectors.shape[-1] // 2
    squares = vectors.double().square()
    rms = (squares[..., :half] + squares[..., half:]).div(2).mean(1)
    logs = (rms.mean(0, keepdim=True) if shared else rms).sqrt().log2()
    return logs - logs.mean(-1, keepdim=True)


@pytest.mark.parametrize("variant", [*VARIANTS, *MOE_VARIANTS])
def test_what_attention_reads_is_that_of_transformers(variant: str, tmp_path: Path) -> None:
    """The oracle's queries and its cache after layer 0, by what the row of the record says.

    Queries are taken before the rotation, which changes no pair's size.
    """
    family, overrides = (VARIANTS | MOE_VARIANTS)[variant]
    path = write_tiny(tmp_path / "model", family, **overrides)
    model = load_oracle(path)
    attention = model.model.layers[0].self_attn
    seen: list[torch.Tensor] = []
    source = attention.q_norm if "qwen3" in variant else attention.q_proj
    source.register_forward_hook(lambda _, __, output: seen.append(output))
    cache: Any = transformers.DynamicCache()
    with torch.no_grad():
        model(torch.tensor([IDS]), cache=cache, use_cache=True)
    keys, values = cache.layers[0].keys[0], cache.layers[0].values[0]  # [kv heads, tokens, dim]
    checkpoint = open_checkpoint(path)
    config = ModelConfig.from_dict(checkpoint.config)
    weights = block_weights(checkpoint, config, 0)
    queries = seen[0].view(len(IDS), config.num_kv_heads, -1, config.head_dim)
    queries = queries.permute(1, 2, 0, 3)[:, :, 4:].flatten(1, 2)  # [kv heads, group * tokens, dim]
    hidden = checkpoint.tensor("model.embed_tokens.weight")[torch.tensor(IDS)]
    block = Conditioner(config, INT8).condition(0, weights, [hidden])
    factors = torch.tensor(block.row.exponents).double().exp2().repeat(1, 2).unsqueeze(1)
    assert block.row.k_amax == pytest.approx(float((keys / factors).abs().max()), rel=1e-4)
    assert block.row.v_amax == pytest.approx(float(values.abs().max()), rel=1e-4)
    keys_log = centred_log2(keys[:, 4:], shared=config.qk_norm)
    queries_log = centred_log2(queries, shared=config.qk_norm)
    for head, (choice, exponents) in enumerate(
        zip(block.row.choices, block.row.exponents, strict=True)
    ):
        expected = choice[0] * keys_log[head] - choice[1] * queries_log[head]
        assert (torch.tensor(exponents) - expected).abs().max() < 0.501


def test_windows_are_evenly_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert search_windows(range(128)) == [0, 64]
    assert search_windows(range(1)) == [0]
    monkeypatch.setattr("qinfer.quant.conditioner.SEARCH_WINDOWS", 4)
    assert search_windows(range(10)) == [0, 2, 5, 7]


def test_a_layer_survives_json() -> None:
    row = LayerConditioning(
        exponents=((0, 1), (-2, 0)),
        choices=((0.5, 0.5), (1.0, 0.0)),
        error_before=(2.0, 1.0),
        error_after=(0.5, 0.25),
        energy=(8.0, 4.0),
        num_clamped=3,
        k_amax=1.5,
        v_amax=2.5,
    )
    assert LayerConditioning.from_dict(json.loads(json.dumps(row.to_dict()))) == row
    assert row.relative_before == 3 / 12
    assert row.relative_after == 0.75 / 12


def test_only_what_makes_keys_and_queries_changes(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model", "qwen2", dtype=torch.bfloat16)
    plant_outliers(path)
    checkpoint = open_checkpoint(path)
    config = ModelConfig.from_dict(checkpoint.config)
    weights = block_weights(checkpoint, config, 1)
    before = {name: w.clone() for name, w in weights.items() if isinstance(w, torch.Tensor)}
    hidden = [torch.randn(30, 64), torch.randn(20, 64)]
    changed = Conditioner(config, INT8).condition(1, weights, hidden).weights
    assert set(changed) == {
        f"self_attn.{name}" for name in ("q_proj", "q_proj.bias", "k_proj", "k_proj.bias")
    }
    assert all(changed[name].dtype == torch.bfloat16 for name in changed)
    for name, weight in weights.items():  # the caller's tensors are not written into
        assert torch.equal(torch.as_tensor(weight), before[name])


def plan(policy: str, path: Path, kv: str | None, **facts: Any) -> Any:
    checkpoint = open_checkpoint(path)
    return plan_conditioning(
        policy,
        source_config=checkpoint.config | facts.pop("changes", {}),
        config=ModelConfig.from_dict(checkpoint.config),
        scheme=None if kv is None else KV_SCHEMES[kv],
        **({"calibrated": True} | facts),
    )


@pytest.mark.parametrize("kv", ["int8", "fp8_e4m3"])
def test_a_quantized_cache_is_conditioned_for_by_default(tiny_llama: Path, kv: str) -> None:
    for policy in ("auto", "on"):
        chosen = plan(policy, tiny_llama, kv)
        assert (chosen.conditioner is None, chosen.notice) == (False, None)
    off = plan("off", tiny_llama, kv)
    assert (off.conditioner, off.notice) == (None, None)


def test_auto_goes_on_without_where_it_cannot_be_done(tiny_llama: Path) -> None:
    for kv in (None, "bf16"):  # nothing to gain, nothing to say
        chosen = plan("auto", tiny_llama, kv)
        assert (chosen.conditioner, chosen.notice) == (None, None)
    chosen = plan("auto", tiny_llama, "int8", calibrated=False)
    assert chosen.conditioner is None
    assert "not calibrated" in chosen.notice
    chosen = plan("auto", tiny_llama, "int8", changes={"partial_rotary_factor": 0.5})
    assert chosen.conditioner is None
    assert "partial_rotary_factor 0.5" in chosen.notice


def test_on_refuses_what_cannot_be_done(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is bf16"):
        plan("on", tiny_llama, "bf16")
    with pytest.raises(ConfigError, match="kv_cache_dtype is none"):
        plan("on", tiny_llama, None)
    with pytest.raises(ConfigError, match="calibrated"):
        plan("on", tiny_llama, "int8", calibrated=False)
    with pytest.raises(UnsupportedModelError, match="MLA"):
        plan("on", tiny_llama, "int8", changes={"kv_lora_rank": 8})


def test_sizes_of_a_model_of_one_kv_head_are_the_shared_ones(tmp_path: Path) -> None:
    """With a single kv head, factors per head and per layer are the same thing."""
    path = write_tiny(tmp_path / "model", "llama", num_key_value_heads=1)
    checkpoint = open_checkpoint(path)
    config = ModelConfig.from_dict(checkpoint.config)
    conditioner = Conditioner(config, INT8)
    sample = conditioner._sample(block_weights(checkpoint, config, 0), torch.randn(20, 64))
    shared, apart = (pair_sizes([sample], shared=flag) for flag in (True, False))
    assert torch.allclose(shared.keys, apart.keys)
    assert torch.allclose(shared.queries, apart.queries)
