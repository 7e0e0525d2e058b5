"""Small GPTQ checkpoints for tests, made by rounding to nearest, without the quantizer."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from qinfer.formats import gptq
from qinfer.formats.weight import QuantizedWeight
from qinfer.models.config import ModelConfig, linear_shapes
from qinfer.schemes import WeightScheme


def round_to_nearest(weight: torch.Tensor, scheme: WeightScheme) -> QuantizedWeight:
    """Quantize `[out, in]` group by group, symmetric."""
    num_groups = scheme.num_groups(weight.shape[1])
    groups = weight.float().unflatten(1, (num_groups, -1))
    scales = (2 * groups.abs().amax(-1) / (2**scheme.bits - 1)).clamp_min(1e-4).half()
    limit = 1 << (scheme.bits - 1)
    codes = (groups / scales.float()[..., None]).round().clamp(-limit, limit - 1)
    return QuantizedWeight(codes.to(torch.int8).flatten(1), scales, scheme)


def quantize_directory(path: Path, scheme: WeightScheme, *, version: gptq.Version = "gptq") -> None:
    """Quantize the decoder linears of a tiny checkpoint in place."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((path / "config.json").read_text())
    for name in linear_shapes(ModelConfig.from_dict(config)):
        weight = round_to_nearest(tensors.pop(f"{name}.weight"), scheme)
        for part, tensor in gptq.to_tensors(weight, version=version).items():
            tensors[f"{name}.{part}"] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    settings = gptq.config(scheme, version=version)
    config["quantization_config"] = settings
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "quantize_config.json").write_text(json.dumps(settings, indent=2))
