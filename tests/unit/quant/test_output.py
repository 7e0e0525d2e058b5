"""What `quantize` writes in each format: the same weights, in settings that are read back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import write_tiny

from qinfer.checkpoint.reader import Checkpoint, open_checkpoint
from qinfer.errors import ConfigError
from qinfer.formats.settings import ModuleFormat
from qinfer.formats.weight import QuantizedWeight
from qinfer.models.config import ModelConfig, linear_shapes
from qinfer.quant.config import QuantizeConfig
from qinfer.quant.pipeline import quantize
from qinfer.quant.targets import make_plan
from qinfer.schemes import WeightScheme

SMALL: dict[str, Any] = {"num_samples": 4, "seq_len": 32, "kv_cache_dtype": "none"}
DOWN = "model.layers.1.mlp.down_proj"


def dense_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Dequantize every decoder linear."""
    found = {}
    for name, (i, o) in linear_shapes(ModelConfig.from_dict(checkpoint.config)).items():
        weight = checkpoint.weight(name, in_features=i, out_features=o)
        found[name] = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 32},
        {"group_size": -1, "weights": "int3", "asym": True},
        {"group_size": 32, "overrides": ("v_proj=bits:8,group_size:-1", "1.mlp.down_proj=skip")},
    ],
)
def test_both_formats_hold_the_same_weights(options, tiny_llama: Path, tmp_path: Path) -> None:
    read = {}
    for form in ("gptq", "compressed-tensors"):
        report = quantize(tiny_llama, tmp_path / form, format=form, **SMALL, **options)
        checkpoint = open_checkpoint(tmp_path / form)
        read[form] = dense_weights(checkpoint)
        planned = quantize(tiny_llama, dry_run=True, format=form, **SMALL, **options)
        assert planned.sizes.output_bytes == checkpoint.total_bytes
        assert report.sizes.output_bytes == checkpoint.total_bytes
    gptq, packed = read.values()
    assert all(torch.equal(gptq[name], packed[name]) for name in gptq)
    parts = {name.rpartition(".")[2] for name in checkpoint.names() if "_proj." in name}
    assert {"weight_packed", "weight_scale", "weight_shape"} <= parts
    assert ("weight_zero_point" in parts) == options.get("asym", False)
    assert not (tmp_path / "compressed-tensors/quantize_config.json").exists()
    assert checkpoint.quantization is not None
    if "overrides" in options:
        assert checkpoint.quantization.scheme_for(DOWN) is None
        v_proj = checkpoint.quantization.scheme_for("model.layers.0.self_attn.v_proj")
        assert v_proj is not None
        assert (v_proj.bits, v_proj.group_size) == (8, None)


def test_w8a8_is_int_quantized(tiny_llama: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"weights": "int8", "group_size": -1, "format": "compressed-tensors"}
    quantize(tiny_llama, tmp_path / "w8a16", **SMALL, **options)
    quantize(tiny_llama, tmp_path / "w8a8", input_activations="int8", **SMALL, **options)
    checkpoint = open_checkpoint(tmp_path / "w8a8")
    settings = checkpoint.quantization
    assert settings is not None
    assert settings.formats == (ModuleFormat("int-quantized", WeightScheme(8, None)),)
    tensors = load_file(tmp_path / "w8a8/model.safetensors")
    assert tensors[f"{DOWN}.weight"].dtype == torch.int8
    assert tensors[f"{DOWN}.weight_scale"].shape == (64, 1)
    other = dense_weights(open_checkpoint(tmp_path / "w8a16"))
    assert all(torch.equal(other[k], w) for k, w in dense_weights(checkpoint).items())
    assert isinstance(checkpoint.weight(DOWN, in_features=128, out_features=64), QuantizedWeight)


def test_w8a8_weights_are_symmetric_and_int8_throughout() -> None:
    shapes = {"a.up_proj": (64, 128), "b.up_proj": (64, 128)}
    base: dict[str, Any] = {"weights": "int8", "group_size": -1, "input_activations": "int8",
                            "format": "compressed-tensors"}  # fmt: skip
    for options in ({"asym": True}, {"overrides": ("b.up=bits:4",)}):
        with pytest.raises(ConfigError, match="symmetric INT8 with one scale per row"):
            make_plan(shapes, QuantizeConfig(**base, **options))


def test_compressed_tensors_takes_shapes_that_gptq_does_not() -> None:
    """Rows are padded to whole words one by one."""
    shapes = {"a": (36, 20)}
    with pytest.raises(ConfigError, match="32-bit words"):
        make_plan(shapes, QuantizeConfig(group_size=-1))
    make_plan(shapes, QuantizeConfig(group_size=-1, format="compressed-tensors"))


def test_routers_of_experts_are_ignored_by_name(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m", "qwen3_moe")
    quantize(path, tmp_path / "q", format="compressed-tensors", algorithm="rtn", group_size=32)
    settings = json.loads((tmp_path / "q/config.json").read_text())["quantization_config"]
    assert r"re:.*\.mlp\.gate$" in settings["ignore"]
    checkpoint = open_checkpoint(tmp_path / "q")
    assert not checkpoint.is_quantized("model.layers.0.mlp.gate")
    assert checkpoint.is_quantized("model.layers.0.mlp.experts.1.up_proj")
