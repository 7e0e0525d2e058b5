"""Variants of every family, and transformers as the oracle of their logits."""

from pathlib import Path
from typing import Any

import torch
import transformers

IDS = torch.randint(0, 288, (90,), generator=torch.Generator().manual_seed(1)).tolist()

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 36}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}
MOE_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral-window-tied": ("mixtral", {"sliding_window": 20, "tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-plain-weights": ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
    "qwen3-moe-every-other": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": [], "num_hidden_layers": 3},
    ),
    "qwen3-moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 20}),
}


def oracle(path: Path, ids: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits
