"""Models whose keys have outliers, without being another function."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from qinfer.checkpoint.files import read_json
from qinfer.models.config import ModelConfig


def plant_outliers(path: Path, *, pair: int = 1, factor: float = 128.0) -> None:
    """Multiply one rotary pair of every k head by `factor` and divide that of the queries.

    The scores, and so the model's function, stay as they are; where q and k are normalized, the
    norms' weights are changed. The checkpoint is one unquantized file.
    """
    config = ModelConfig.from_dict(read_json(path / "config.json"))
    half = config.head_dim // 2
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if config.qk_norm:
            is_key, is_query = ".k_norm." in name, ".q_norm." in name
        else:
            is_key, is_query = ".k_proj." in name, ".q_proj." in name
        if is_key or is_query:
            rows = tensor.view(-1, 2, half, *tensor.shape[1:])  # [heads, half of the pair, pair]
            rows[:, :, pair] *= factor if is_key else 1 / factor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def add_key_bias(path: Path, *, layer: int, pair: int, value: float) -> None:
    """Give one rotary pair of every k head of a layer a bias of `value` and minus `value`."""
    config = ModelConfig.from_dict(read_json(path / "config.json"))
    tensors = load_file(path / "model.safetensors")
    bias = tensors[f"model.layers.{layer}.self_attn.k_proj.bias"].view(config.num_kv_heads, 2, -1)
    bias[:, 0, pair], bias[:, 1, pair] = value, -value
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
