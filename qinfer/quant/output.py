"""What the checkpoint that is written looks like: its tensors, settings and record of the KV cache.

Everything that depends on the output format is decided here.
"""

from typing import Any

import torch

from qinfer.formats import gptq as gptq_format
from qinfer.formats import gptq_config
from qinfer.formats.weight import QuantizedWeight
from qinfer.quant import bnb
from qinfer.quant.config import QuantizeConfig
from qinfer.quant.targets import Plan

KV_RECORD = "qinfer_kv_cache"
KV_RECORD_VERSION = 1
SETTINGS_NAME = "quantize_config.json"


def module_tensors(plan: Plan, name: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of a quantized linear by their full names."""
    version = gptq_config.preferred_version(plan.scheme)
    tensors = gptq_format.to_tensors(weight, version=version)
    return {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}


def settings(plan: Plan, config: QuantizeConfig) -> dict[str, Any]:
    """Return how the weights are quantized, as other engines read it."""
    meta: dict[str, Any] = {"method": config.algorithm, "true_sequential": config.calibrated}
    if config.calibrated:
        meta["damp_percent"] = config.damp_percent
    return gptq_config.config(
        plan.scheme,
        version=gptq_config.preferred_version(plan.scheme),
        overrides=plan.file_overrides(),
        meta=meta,
    )


def json_files(
    source_config: dict[str, Any], plan: Plan, config: QuantizeConfig
) -> dict[str, dict[str, Any]]:
    """Return the JSON files that describe the checkpoint, by name."""
    described = {key: value for key, value in source_config.items() if key != KV_RECORD}
    kv = config.kv_scheme()
    if kv is not None:
        described[KV_RECORD] = {
            "format_version": KV_RECORD_VERSION,
            "dtype": kv.dtype,
            "granularity": kv.granularity,
        }
    if config.algorithm in bnb.ALGORITHMS:
        dtype = str(source_config.get("dtype") or source_config.get("torch_dtype") or "float32")
        skipped = [target.name for target in plan.targets if target.scheme is None]
        described["quantization_config"] = bnb.settings(config.algorithm, dtype, skipped)
        return {"config.json": described}
    described["quantization_config"] = settings(plan, config)
    return {"config.json": described, SETTINGS_NAME: settings(plan, config)}
