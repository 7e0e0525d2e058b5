"""What the checkpoint that is written looks like: its tensors, settings and record of the KV cache.

Everything that depends on the output format is decided here.
"""

from typing import Any

import torch

from qinfer.checkpoint.settings import KV_KEY, kv_config
from qinfer.formats import kv_scales
from qinfer.formats.output import HEAD, OutputFacts
from qinfer.formats.weight import QuantizedWeight
from qinfer.quant import bnb
from qinfer.quant.conditioner import RECORD_NAME, ConditioningRecord
from qinfer.quant.config import QuantizeConfig
from qinfer.quant.targets import Plan

# Linears too in the classes of other engines, and never quantized.
_ROUTERS = (r"re:.*\.mlp\.gate$", r"re:.*\.block_sparse_moe\.gate$")


def module_tensors(plan: Plan, name: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of a quantized linear by their full names."""
    tensors = plan.form.to_tensors(weight)
    return {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}


def settings(
    plan: Plan, config: QuantizeConfig, *, static_kv_scales: bool = False
) -> dict[str, Any]:
    """Return how the weights are quantized, as other engines read it.

    Args:
        plan: the modules and their schemes.
        config: the options.
        static_kv_scales: the checkpoint holds scales for FP8 caches of other engines.
    """
    meta: dict[str, Any] = {"method": config.algorithm, "true_sequential": config.calibrated}
    if config.calibrated:
        meta["damp_percent"] = config.damp_percent
    experts = any(".experts." in target.name for target in plan.targets)
    return plan.form.settings(
        OutputFacts(
            scheme=plan.scheme,
            modules={target.name: target.scheme for target in plan.targets},
            ignored=(HEAD, *(_ROUTERS if experts else ())),
            patterns=plan.file_overrides(),
            meta=meta,
            kv_scheme=kv_scales.kv_config() if static_kv_scales else None,
        )
    )


def json_files(
    source_config: dict[str, Any],
    plan: Plan,
    config: QuantizeConfig,
    conditioning: ConditioningRecord | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the JSON files that describe the checkpoint, by name."""
    described = {key: value for key, value in source_config.items() if key != KV_KEY}
    kv = config.kv_scheme()
    if kv is not None:
        summary = None if conditioning is None else conditioning.summary()
        described[KV_KEY] = kv_config(kv, summary)
    if config.algorithm in bnb.ALGORITHMS:
        dtype = str(source_config.get("dtype") or source_config.get("torch_dtype") or "float32")
        skipped = [target.name for target in plan.targets if target.scheme is None]
        described["quantization_config"] = bnb.settings(config.algorithm, dtype, skipped)
        return {"config.json": described}
    static = conditioning is not None and conditioning.static_scales
    described["quantization_config"] = settings(plan, config, static_kv_scales=static)
    beside = dict.fromkeys(plan.form.side_files, described["quantization_config"])
    if conditioning is not None:
        beside[RECORD_NAME] = conditioning.to_dict()
    return {"config.json": described, **beside}
