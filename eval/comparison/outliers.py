"""A model with key outliers that computes the same: what Qwen2 has, on a model that has none."""

from pathlib import Path

import torch

from qinfer.checkpoint.reader import open_checkpoint
from qinfer.checkpoint.writer import CheckpointWriter
from qinfer.models.config import ModelConfig

PAIR = 20  # of 32: a slow one, where Qwen2's own outliers are
FACTOR = 128.0  # a power of two: exact in bfloat16


def plant(source: Path, out: Path) -> None:
    """Write a model whose keys are `FACTOR` times larger in one rotary pair of every head.

    The queries of that pair are divided by the factor, so that the function stays the same.
    """
    checkpoint = open_checkpoint(source)
    config = ModelConfig.from_dict(checkpoint.config)
    with CheckpointWriter(out) as writer:
        for name in checkpoint.names():
            tensor = checkpoint.tensor(name)
            if name.endswith("k_proj.weight"):
                tensor = _scaled(tensor, config.num_kv_heads, FACTOR)
            elif name.endswith("q_proj.weight"):
                tensor = _scaled(tensor, config.num_heads, 1.0 / FACTOR)
            writer.add(name, tensor)
        writer.write_json("config.json", checkpoint.config)
        writer.copy_companions(source)


def _scaled(weight: torch.Tensor, num_heads: int, factor: float) -> torch.Tensor:
    heads = weight.clone().unflatten(0, (num_heads, -1))  # [heads, head_dim, hidden]
    half = heads.shape[1] // 2
    heads[:, [PAIR, PAIR + half]] *= factor
    return heads.flatten(0, 1)
