"""Tiny checkpoints whose linears are quantized in a format other than GPTQ's, without qinfer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.weights import bit_stream, gemm_tensors, random_weight

from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import WeightScheme

Tensors = dict[str, torch.Tensor]


def put_weights(
    path: Path,
    scheme: WeightScheme,
    to_tensors: Callable[[QuantizedWeight], Tensors],
    settings: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float16,
    extra: Tensors | None = None,
) -> dict[str, QuantizedWeight]:
    """Replace the decoder's linears by random weights in place; returns them by module."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    weights: dict[str, QuantizedWeight] = {}
    for seed, name in enumerate(sorted(n for n in tensors if n.endswith("_proj.weight"))):
        out, in_ = tensors.pop(name).shape
        module = name.removesuffix(".weight")
        weight = random_weight(scheme, out, in_, seed=seed, dtype=dtype, min_zero=1)
        scales = (weight.scales * 0.01).to(dtype)  # so that the model stays finite
        weights[module] = QuantizedWeight(weight.codes, scales, scheme, weight.zeros)
        parts = to_tensors(weights[module])
        tensors |= {f"{module}.{part}": t.contiguous() for part, t in parts.items()}
    save_file(tensors | (extra or {}), file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": settings}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return weights


def packed_tensors(weight: QuantizedWeight) -> Tensors:
    """Return `pack-quantized` tensors, packed bit by bit."""
    bits = weight.scheme.bits
    middle = 1 << (bits - 1)
    tensors = {
        "weight_packed": bit_stream(weight.codes.int() + middle, bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.codes.shape),
    }
    if weight.zeros is not None:
        tensors["weight_zero_point"] = bit_stream(weight.zeros.T.int() + middle, bits).T
    return tensors


def int8_tensors(weight: QuantizedWeight) -> Tensors:
    """Return `int-quantized` tensors."""
    return {"weight": weight.codes, "weight_scale": weight.scales}


def awq_tensors(weight: QuantizedWeight) -> Tensors:
    """Return AutoAWQ's tensors."""
    return gemm_tensors(weight)


def compressed_settings(scheme: WeightScheme, layout: str = "pack-quantized") -> dict[str, Any]:
    """Return settings in compressed-tensors' spelling of 2024."""
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
    }
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs if layout == "int-quantized" else None,
            }
        },
        "ignore": ["lm_head"],
    }


def awq_settings(scheme: WeightScheme) -> dict[str, Any]:
    """Return AutoAWQ's settings."""
    return {
        "quant_method": "awq", "w_bit": 4, "q_group_size": scheme.group_size or -1,
        "zero_point": True, "version": "GEMM",
    }  # fmt: skip
