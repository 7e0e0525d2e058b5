"""The function of a dense Llama checkpoint as a Mixtral one."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

NUM_EXPERTS = 4


def write_as_mixtral(source: Path, path: Path) -> Path:
    """Cut every MLP of `source` (one shard) into four experts that are all chosen.

    The router is zero, so each expert has a quarter of the weight, and `down_proj` is made four
    times as large; both are exact in binary floating point.
    """
    path.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, path)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".mlp." in name:
            tensors |= _experts(name, tensor)
        else:
            tensors[name] = tensor
    config = json.loads((source / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        router = torch.zeros(NUM_EXPERTS, config["hidden_size"], dtype=torch.bfloat16)
        tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = router
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": config["intermediate_size"] // NUM_EXPERTS,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_EXPERTS,
        "sliding_window": None,
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return path


def _experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the parts of gate, up or down under the names that Mixtral gives them."""
    prefix, _, rest = name.partition(".mlp.")
    linear = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[rest.partition(".")[0]]
    dim = 1 if linear == "w2" else 0
    parts = [part.clone() for part in tensor.chunk(NUM_EXPERTS, dim)]
    if linear == "w2":
        parts = [part * NUM_EXPERTS for part in parts]
    return {
        f"{prefix}.block_sparse_moe.experts.{index}.{linear}.weight": part
        for index, part in enumerate(parts)
    }
