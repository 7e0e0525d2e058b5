"""Frequencies against transformers, at sizes of real models."""

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qinfer.models.config import ModelConfig
from qinfer.models.rope import RotaryTable, inverse_frequencies

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_stretched_frequencies_equal_those_of_transformers(name: str) -> None:
    parameters = {"rope_type": name, "rope_theta": 500000.0} | SCALINGS[name]
    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    expected, factor = ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](
        config, torch.device("cpu")
    )
    rope = ModelConfig.from_dict(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}).rope
    assert torch.allclose(inverse_frequencies(rope, 128), expected, rtol=1e-6)
    assert rope.attention_factor == pytest.approx(factor)


def test_the_table_covers_exactly_its_length() -> None:
    rope = ModelConfig.from_dict(
        transformers.LlamaConfig(architectures=["LlamaForCausalLM"]).to_dict()
    ).rope
    table = RotaryTable(rope, 8, 10)
    cos, sin = table.at(torch.tensor([0, 9]))
    assert cos.shape == sin.shape == (2, 1, 4)
    assert torch.allclose(cos.square() + sin.square(), torch.ones(2, 1, 4))
    with pytest.raises(IndexError):
        table.at(torch.tensor([10]))
