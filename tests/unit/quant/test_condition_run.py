"""`condition` on tiny checkpoints: the same function, the same bytes elsewhere, better keys."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json, load_oracle, write_tiny
from support.decoders import IDS, VARIANTS
from support.outliers import add_key_bias, plant_outliers
from support.quantized import quantize_directory

from qinfer import LLM
from qinfer.checkpoint.convert import convert_format
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.checkpoint.settings import read_kv_scheme
from qinfer.errors import CheckpointError, ConfigError, NonFiniteError, UnsupportedModelError
from qinfer.formats.weight import QuantizedWeight
from qinfer.quant import conditioner
from qinfer.quant.condition_run import ConditionReport, _scales_of, condition
from qinfer.schemes import WeightScheme

SOME: dict[str, Any] = {"num_samples": 2, "seq_len": 64}
# One variant of every kind of place that factors are folded into, and of every kind of head.
KINDS = ("llama", "llama-tied", "llama-biases", "llama-mqa", "llama-head-dim", "llama-yarn",
         "mistral-window", "qwen2", "qwen3", "qwen3-tied-bias")  # fmt: skip


def write_variant(path: Path, variant: str, dtype: torch.dtype = torch.float32) -> Path:
    family, overrides = VARIANTS[variant]
    write_tiny(path, family, dtype=dtype, **overrides)
    plant_outliers(path)
    return path


def transformers_logits(path: Path, dtype: torch.dtype) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = load_oracle(path, dtype)(torch.tensor([IDS])).logits[0]
    return logits


def score(path: Path, dtype: str, kv_cache_dtype: str) -> list[float]:
    with LLM(path, dtype=dtype, kv_cache_dtype=kv_cache_dtype, threads=1) as llm:
        return llm.score([IDS])[0]


def divergence(path: Path, baseline: Path, kv_cache_dtype: str) -> float:
    """Return the mean KL divergence from `baseline` with an fp32 cache."""
    rows = []
    for model, kv in ((baseline, "fp32"), (path, kv_cache_dtype)):
        parts: list[torch.Tensor] = []

        def keep(_: int, __: int, part: torch.Tensor, to: list[torch.Tensor] = parts) -> None:
            to.append(part.double().clone())

        with LLM(model, dtype="float32", kv_cache_dtype=kv, threads=1) as llm:
            llm.score([IDS], keep)
        rows.append(torch.cat(parts))
    base, other = rows
    return float((base.exp() * (base - other)).sum(-1).mean())


def factors_differ(report: ConditionReport) -> bool:
    return all(any(any(row) for row in layer.exponents) for layer in report.record.layers)


@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_stay_the_same_to_the_bit(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = write_variant(tmp_path / "model", variant, dtype)
    report = condition(source, tmp_path / "out", **SOME)
    assert factors_differ(report)
    before, after = (transformers_logits(path, dtype) for path in (source, report.out))
    assert torch.equal(before, after)
    assert before.float().std() > 0.1
    name = str(dtype).removeprefix("torch.")
    kv = "fp32" if dtype == torch.float32 else "bf16"
    assert score(source, name, kv) == score(report.out, name, kv)


@pytest.mark.parametrize("variant", KINDS)
def test_no_head_gets_worse_and_planted_outliers_go(variant: str, tmp_path: Path) -> None:
    source = write_variant(tmp_path / "model", variant)
    record = condition(source, tmp_path / "out", **SOME).record
    plain = write_tiny(tmp_path / "plain", VARIANTS[variant][0], **VARIANTS[variant][1])
    without = condition(plain, tmp_path / "without", **SOME).record
    for layer, bare in zip(record.layers, without.layers, strict=True):
        if "qwen3" in variant:  # all heads share their factors
            assert len(layer.exponents) == 1
            assert sum(layer.error_after) <= sum(layer.error_before)
        else:
            pairs = zip(layer.error_after, layer.error_before, strict=True)
            assert all(after <= before for after, before in pairs)
        assert layer.relative_after < 0.02 * layer.relative_before
        assert layer.relative_after < 1.5 * bare.relative_after  # as if there had been none
        assert all(row[1] >= 4 for row in layer.exponents)  # the planted pair, times 128
    assert divergence(tmp_path / "out", source, "int8") < 0.02 * divergence(source, source, "int8")


def test_k01_a_huge_key_bias(tmp_path: Path) -> None:
    """The other seven pairs get their precision back; that of the pair itself no factor can mend:
    a step of 300 / 127 is that of its own values."""
    source = write_tiny(tmp_path / "model", "qwen2")
    add_key_bias(source, layer=0, pair=7, value=300.0)
    plain = divergence(source, source, "int8")
    out = condition(source, tmp_path / "out", **SOME).out
    conditioned = divergence(out, source, "int8")
    assert conditioned < 0.05
    assert conditioned < 0.25 * plain


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gptq_checkpoint_keeps_its_codes_and_all_else(
    version: Any, family: str, tmp_path: Path
) -> None:
    source = write_tiny(tmp_path / "model", family, dtype=torch.float16)
    plant_outliers(source)
    quantize_directory(source, WeightScheme(4, 32), version=version)
    out = condition(source, tmp_path / "out", **SOME).out
    before, after = (load_file(path / "model.safetensors") for path in (source, out))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert changed  # and only these:
    parts = ("norm.weight",) if family == "qwen3" else ("proj.scales", "proj.bias")
    assert all(
        name.endswith(parts) and ("self_attn.q_" in name or "self_attn.k_" in name)
        for name in changed
    )
    assert score(source, "float32", "fp32") == score(out, "float32", "fp32")
    assert divergence(out, source, "int8") < 0.1 * divergence(source, source, "int8")
    for name in ("quantize_config.json", "tokenizer.json", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, None)])
def test_conditioning_and_conversion_may_come_in_any_order(
    bits: int, group_size: int | None, tmp_path: Path
) -> None:
    source = write_tiny(tmp_path / "model", "qwen2", dtype=torch.float16)
    plant_outliers(source)
    quantize_directory(source, WeightScheme(bits, group_size))
    converted, both = tmp_path / "converted", tmp_path / "both"
    convert_format(source, converted, name="compressed-tensors")
    first = condition(converted, tmp_path / "out", **SOME).out
    convert_format(
        condition(source, tmp_path / "gptq", **SOME).out, both, name="compressed-tensors"
    )
    one, other = (load_file(path / "model.safetensors") for path in (first, both))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_scale_for_the_whole_tensor_carries_no_factors(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "model", dtype=torch.float16)
    quantize_directory(source, WeightScheme(8, None))
    convert_format(source, tmp_path / "ct", name="compressed-tensors")
    file = tmp_path / "ct" / "model.safetensors"
    name = "model.layers.1.self_attn.k_proj"
    checkpoint = open_checkpoint(tmp_path / "ct")
    weight = checkpoint.weight(name, in_features=64, out_features=32)
    assert isinstance(weight, QuantizedWeight)
    assert _scales_of(checkpoint, name, weight) == ("weight_scale", 0)
    tensors = load_file(file)
    tensors[f"{name}.weight_scale"] = tensors[f"{name}.weight_scale"][:1].flatten()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj.*row by row"):
        _scales_of(open_checkpoint(tmp_path / "ct"), name, weight)


def test_other_tensors_and_files_keep_their_bytes(tmp_path: Path) -> None:
    source = write_variant(tmp_path / "model", "llama-biases", torch.bfloat16)
    (source / "LICENSE").write_text("free")
    out = condition(source, tmp_path / "out", **SOME).out
    before, after = (load_file(path / "model.safetensors") for path in (source, out))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        touched = "q_proj" in name or "k_proj" in name
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor) is not touched, name
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in out.iterdir()} == names | {conditioner.RECORD_NAME}
    for name in names - {"config.json", "model.safetensors"}:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((out / "config.json").read_text())
    del config["qinfer_kv_cache"]
    assert config == json.loads((source / "config.json").read_text())


def test_the_record_stays_with_the_checkpoint(tmp_path: Path) -> None:
    source = write_variant(tmp_path / "model", "qwen2")
    report = condition(source, tmp_path / "out", kv_cache_dtype="fp8", **SOME)
    full = json.loads((report.out / conditioner.RECORD_NAME).read_text())
    assert full == json.loads(json.dumps(report.record.to_dict()))
    assert (full["format_version"], full["kv"]) == (1, "fp8_e4m3")
    assert (full["num_windows"], full["num_tokens"]) == (2, 128)
    rows = tuple(conditioner.LayerConditioning.from_dict(row) for row in full["layers"])
    assert rows == report.record.layers
    kv = json.loads((report.out / "config.json").read_text())["qinfer_kv_cache"]
    assert kv["conditioning"] == report.record.summary()
    assert sum(kv["conditioning"]["choices"].values()) == 2 * 2  # layers x kv heads
    assert len(kv["conditioning"]["error_before"]) == 2
    scheme = open_checkpoint(report.out).kv_scheme
    assert scheme is not None
    assert scheme.dtype == "fp8_e4m3"


def test_records_without_conditioning_stay_readable_and_newer_ones_are_refused() -> None:
    old = {"format_version": 1, "dtype": "int8", "granularity": "token_head"}
    assert read_kv_scheme({"qinfer_kv_cache": old}) is not None
    assert read_kv_scheme({"qinfer_kv_cache": old | {"conditioning": {"kv": "int8"}}}) is not None
    with pytest.raises(CheckpointError, match="format_version is 2"):
        read_kv_scheme({"qinfer_kv_cache": old | {"format_version": 2}})


def test_conditioning_twice_is_harmless_and_said(tmp_path: Path) -> None:
    source = write_variant(tmp_path / "model", "llama", torch.bfloat16)
    first = condition(source, tmp_path / "once", **SOME)
    second = condition(first.out, tmp_path / "twice", **SOME)
    assert (first.repeated, second.repeated) == (False, True)
    assert second.record.kv == "int8"
    before, after = (transformers_logits(p, torch.bfloat16) for p in (source, second.out))
    assert torch.equal(before, after)
    for once, twice in zip(first.record.layers, second.record.layers, strict=True):
        assert twice.relative_before == pytest.approx(once.relative_after, rel=1e-6)


def test_bytes_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    source = write_variant(tmp_path / "model", "qwen2")
    texts = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            report = condition(source, tmp_path / str(threads), **SOME)
        finally:
            torch.set_num_threads(1)
        assert (report.record.kv, report.record.num_tokens) == ("int8", 128)
        texts.append([path.read_bytes() for path in sorted(report.out.iterdir())])
    assert texts[0] == texts[1]


def test_progress_is_reported_after_every_layer(tiny_llama: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    condition(
        tiny_llama, tmp_path / "out", on_layer=lambda n, total, _: seen.append((n, total)), **SOME
    )
    assert seen == [(1, 2), (2, 2)]


def test_weights_in_float16_hold_factors_back_and_say_so(tmp_path: Path) -> None:
    """Small weights in float16 are subnormal; dividing them would lose bits."""
    source = write_variant(tmp_path / "model", "llama", torch.float16)
    report = condition(source, tmp_path / "out", **SOME)
    assert sum(layer.num_clamped for layer in report.record.layers) > 0
    before, after = (transformers_logits(p, torch.float16) for p in (source, report.out))
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"model_type": "gemma3_text"}, r"1 \+ w"),
        ({"model_type": "cohere"}, "interleaved"),
        ({"model_type": "gpt2"}, "not rotary"),
        ({"position_embedding_type": "alibi"}, "not rotary"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ({"rotary_pct": 0.25}, r"rotary_pct 0\.25"),
    ],
)
def test_what_cannot_be_conditioned_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    source = write_tiny(tmp_path / "model")
    edit_json(source / "config.json", **changes)
    with pytest.raises(UnsupportedModelError, match=reason):
        condition(source, tmp_path / "out", **SOME)
    assert not (tmp_path / "out").exists()


def test_options_that_cannot_work_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bf16.*not quantized"):
        condition(tiny_llama, tmp_path / "out", kv_cache_dtype="bf16")
    with pytest.raises(ConfigError, match="num_samples 0"):
        condition(tiny_llama, tmp_path / "out", num_samples=0)
    with pytest.raises(ConfigError, match="exists already"):
        condition(tiny_llama, tmp_path)


def test_static_key_scales_are_refused(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "model")
    file = source / "model.safetensors"
    scale = {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    save_file(load_file(file) | scale, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_scale"):
        condition(source, tmp_path / "out", **SOME)


def test_an_activation_that_is_not_finite_is_named(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "model")
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"][3, 4] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"model\.layers\.0"):
        condition(source, tmp_path / "out", **SOME)
    assert not (tmp_path / "out").exists()
