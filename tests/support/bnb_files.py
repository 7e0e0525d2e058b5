"""Tiny checkpoints as transformers saves them with bitsandbytes, quantized by that library."""

import json
from pathlib import Path
from typing import Any

import torch
from bitsandbytes import functional
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig

from qinfer.models.config import ModelConfig, linear_shapes


def quantize_directory(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Quantize the decoder linears of a checkpoint in place; return what they stand for, by name.

    Args:
        path: the checkpoint.
        options: of `BitsAndBytesConfig`.
    """
    settings = BitsAndBytesConfig(**options)
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    dense: dict[str, torch.Tensor] = {}
    for name in linear_shapes(ModelConfig.from_dict(config)):
        if any(name.endswith(skipped) for skipped in settings.llm_int8_skip_modules or ()):
            continue
        weight = tensors.pop(f"{name}.weight")
        parts, dense[name] = _four_bit(weight, settings) if settings.load_in_4bit else _int8(weight)
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = settings.to_dict()
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return dense


def _four_bit(
    weight: torch.Tensor, settings: BitsAndBytesConfig
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    packed, state = functional.quantize_4bit(
        weight,
        quant_type=settings.bnb_4bit_quant_type,
        compress_statistics=settings.bnb_4bit_use_double_quant,
    )
    parts = {f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}
    return {"weight": packed, **parts}, functional.dequantize_4bit(packed, state)


def _int8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes, largest, _ = functional.int8_vectorwise_quant(weight.half())
    parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, functional.int8_vectorwise_dequant(codes, largest)
