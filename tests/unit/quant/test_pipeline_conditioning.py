"""`quantize` conditions keys before it quantizes what makes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json, write_tiny
from support.outliers import add_key_bias, plant_outliers

from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import ConfigError, QuantizationError
from qinfer.formats.kv_scales import FP8_MAX
from qinfer.quant import conditioning
from qinfer.quant.conditioner import RECORD_NAME
from qinfer.quant.pipeline import quantize

SMALL: dict[str, Any] = {"num_samples": 4, "seq_len": 48, "group_size": 32, "threads": 1}
PROJECTIONS = ("q_proj", "k_proj")


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny(tmp_path_factory.mktemp("model") / "qwen2", "qwen2", dtype=torch.bfloat16)
    plant_outliers(path)
    return path


def kv_record(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((path / "config.json").read_text())["qinfer_kv_cache"]
    return record


def test_keys_are_conditioned_by_default(outliers: Path, tmp_path: Path) -> None:
    report = quantize(outliers, tmp_path / "out", **SMALL)
    record = json.loads((tmp_path / "out" / RECORD_NAME).read_text())
    kept = kv_record(tmp_path / "out")
    assert kept["dtype"] == "int8"
    assert report.conditioning == kept["conditioning"]
    assert kept["conditioning"]["num_tokens"] == record["num_tokens"] == 2 * 48
    for before, after in zip(
        kept["conditioning"]["error_before"], kept["conditioning"]["error_after"], strict=True
    ):
        assert after < 0.05 * before
    tensors, source = (
        load_file(path / "model.safetensors") for path in (tmp_path / "out", outliers)
    )
    for number, layer in enumerate(record["layers"]):
        prefix = f"model.layers.{number}.self_attn"
        exponents = torch.tensor(layer["exponents"]).repeat(1, 2).flatten().double()  # [kv rows]
        factors = exponents.exp2()
        before, after = (t[f"{prefix}.k_proj.bias"].double() for t in (source, tensors))
        assert torch.equal(after * factors, before)
        assert all(row[1] >= 4 for row in layer["exponents"])  # the planted pair


def test_off_leaves_them_and_keeps_no_record(outliers: Path, tmp_path: Path) -> None:
    report = quantize(outliers, tmp_path / "out", condition_kv="off", **SMALL)
    assert report.conditioning == {}
    assert not (tmp_path / "out" / RECORD_NAME).exists()
    assert "conditioning" not in kv_record(tmp_path / "out")
    tensors, source = (
        load_file(path / "model.safetensors") for path in (tmp_path / "out", outliers)
    )
    for name in (f"model.layers.1.self_attn.{part}.bias" for part in PROJECTIONS):
        assert torch.equal(tensors[name], source[name])


def test_modules_that_stay_unquantized_are_conditioned_too(outliers: Path, tmp_path: Path) -> None:
    quantize(outliers, tmp_path / "out", overrides=("k_proj=skip", "q_proj=skip"), **SMALL)
    tensors, source = (
        load_file(path / "model.safetensors") for path in (tmp_path / "out", outliers)
    )
    layers = json.loads((tmp_path / "out" / RECORD_NAME).read_text())["layers"]
    for number, layer in enumerate(layers):
        name = f"model.layers.{number}.self_attn.k_proj.weight"
        factors = torch.tensor(layer["exponents"]).repeat(1, 2).flatten().double().exp2()
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name].double() * factors[:, None], source[name].double())


def test_layers_without_a_quantized_module_are_conditioned_too(
    outliers: Path, tmp_path: Path
) -> None:
    report = quantize(outliers, tmp_path / "out", overrides=(r"layers\.1\.=skip",), **SMALL)
    layers = json.loads((tmp_path / "out" / RECORD_NAME).read_text())["layers"]
    assert len(layers) == len(report.conditioning["error_after"]) == 2
    tensors, source = (
        load_file(path / "model.safetensors") for path in (tmp_path / "out", outliers)
    )
    name = "model.layers.1.self_attn.k_proj.weight"
    factors = torch.tensor(layers[1]["exponents"]).repeat(1, 2).flatten().double().exp2()
    assert factors.max() >= 16  # the planted pair
    assert torch.equal(tensors[name].double() * factors[:, None], source[name].double())


def test_without_calibration_the_report_says_why_not(outliers: Path, tmp_path: Path) -> None:
    report = quantize(outliers, tmp_path / "out", algorithm="rtn", **SMALL)
    assert "not calibrated" in report.conditioning["notice"]
    planned = quantize(outliers, dry_run=True, algorithm="rtn", **SMALL)
    assert planned.conditioning == report.conditioning
    assert "conditioning" not in kv_record(tmp_path / "out")


def test_what_cannot_be_done_is_refused_before_any_work(outliers: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is none"):
        quantize(outliers, tmp_path / "out", condition_kv="on", kv_cache_dtype="none", dry_run=True)


def test_static_scales_go_where_the_format_has_room_for_them(
    outliers: Path, tmp_path: Path
) -> None:
    for form in ("compressed-tensors", "gptq"):
        quantize(outliers, tmp_path / form, format=form, kv_cache_dtype="fp8_e4m3", **SMALL)
    path = tmp_path / "compressed-tensors"
    scheme = json.loads((path / "config.json").read_text())["quantization_config"]
    assert scheme["kv_cache_scheme"]["type"] == "float"
    tensors = load_file(path / "model.safetensors")
    layers = json.loads((path / RECORD_NAME).read_text())["layers"]
    for number, layer in enumerate(layers):
        for part in "kv":
            scale = tensors[f"model.layers.{number}.self_attn.{part}_scale"]
            assert scale.shape == (1,)
            assert scale.dtype == torch.bfloat16
            wanted = layer[f"{part}_amax"] / FP8_MAX
            assert wanted <= float(scale) <= 1.01 * wanted
    checkpoint = open_checkpoint(path)
    assert checkpoint.kv_scheme is not None
    report = json.loads((path / "quantize_report.json").read_text())
    assert report["sizes"]["output_bytes"] == checkpoint.total_bytes
    assert not any("_scale" in name for name in open_checkpoint(tmp_path / "gptq").names())
    edit_json(path / "config.json", qinfer_kv_cache=None)
    assert open_checkpoint(path).quantization is not None


def write_sized(path: Path, size: float) -> Path:
    """Write a model whose q and k have rows as large as `size`, and key outliers from a bias."""
    write_tiny(path, "qwen2", dtype=torch.bfloat16)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor.copy_(tensor.float() / tensor.float().abs().amax(1, keepdim=True) * size)
        if name.endswith("input_layernorm.weight"):
            tensor.mul_(0.1 / size)
        if name.endswith(("q_proj.bias", "k_proj.bias")):
            tensor.zero_()
    save_file(tensors, file, metadata={"format": "pt"})
    for layer in range(2):
        add_key_bias(path, layer=layer, pair=3, value=200.0)
    return path


def scales_of(path: Path) -> torch.Tensor:
    tensors = load_file(path / "model.safetensors")
    ends = ("q_proj.scales", "k_proj.scales")
    return torch.cat([t.float().flatten() for name, t in tensors.items() if name.endswith(ends)])


def no_scale_limits(_: object, __: object, *shape: int) -> conditioning.Limits:
    return conditioning.no_limits(*shape)


def test_factors_leave_scales_of_small_weights_their_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search of scales takes them to 0.61 of what the range needs, at the least."""
    path = write_sized(tmp_path / "model", 1e-4)
    quantize(path, tmp_path / "plain", condition_kv="off", **SMALL)
    quantize(path, tmp_path / "out", condition_kv="on", **SMALL)
    least = 0.6 * 2.0 ** (4 - 24)
    assert float(scales_of(tmp_path / "plain").min()) > 2 * least
    assert float(scales_of(tmp_path / "out").min()) > least
    record = json.loads((tmp_path / "out" / RECORD_NAME).read_text())
    assert any(layer["num_clamped"] for layer in record["layers"])
    monkeypatch.setattr(conditioning, "scale_limits", no_scale_limits)
    quantize(path, tmp_path / "free", condition_kv="on", **SMALL)
    assert float(scales_of(tmp_path / "free").min()) < least


def test_factors_take_no_scale_beyond_float16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be quantized as it is can be with factors too."""
    path = write_sized(tmp_path / "model", 3e5)
    quantize(path, tmp_path / "plain", condition_kv="off", **SMALL)
    quantize(path, tmp_path / "out", condition_kv="on", **SMALL)
    assert bool(scales_of(tmp_path / "out").isfinite().all())
    monkeypatch.setattr(conditioning, "scale_limits", no_scale_limits)
    with pytest.raises(QuantizationError, match="exceeds float16"):
        quantize(path, tmp_path / "free", condition_kv="on", **SMALL)
