"""Model facts read from config.json: old and new spellings, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import transformers
from support.checkpoints import write_tiny

from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.models.config import ModelConfig, block_tensor_shapes, linear_shapes

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}

MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(BASE | changes)


def test_plain_facts() -> None:
    config = read(head_dim=None, rope_theta=5e5)
    assert config.head_dim == 16
    assert config.rope.theta == 5e5
    assert config.rope.type == "default"
    assert config.dtype == "bfloat16"
    assert config.windows == (None, None)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (False, False, False)
    assert not config.qk_norm


def test_old_and_new_spelling_of_rope_and_dtype_say_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    old = read(rope_theta=5e5, rope_scaling=scaling | {"type": "llama3"})
    parameters = scaling | {"rope_type": "llama3", "rope_theta": 5e5}
    new = ModelConfig.from_dict(
        {key: value for key, value in BASE.items() if key != "torch_dtype"}
        | {"rope_parameters": parameters, "dtype": "bfloat16"}
    )
    assert old == new
    assert old.rope.type == "llama3"


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, (20, 20)),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, (None, None)),
        (
            {
                "model_type": "qwen2",
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 20),
        ),
        (
            {
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (20, None),
        ),
        (MIXTRAL, (20, 20)),
        (QWEN3_MOE, (None, None)),
        ({**QWEN3_MOE, "use_sliding_window": True, "max_window_layers": 1}, (20, 20)),
        ({}, (None, None)),
    ],
)
def test_sliding_windows_follow_the_family(
    changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read(sliding_window=20, **changes).windows == windows


def test_family_facts_decide_over_the_config() -> None:
    qwen2 = read(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)
    qwen3 = read(model_type="qwen3", architectures=["Qwen3ForCausalLM"], attention_bias=True)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (True, True, True)


def test_unknown_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(model_type="gpt2", architectures=["GPT2LMHeadModel"])
    for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (
            {"num_local_experts": 8},
            "mixture-of-experts blocks in a model of type llama; they are run for mixtral, qwen3_m",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
    ],
)
def test_variants_that_would_run_wrongly_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(**changes)


@pytest.mark.parametrize("value", [None, 0, "64", True, 2.5])
def test_missing_or_senseless_sizes_name_the_field(value: object) -> None:
    with pytest.raises(CheckpointError, match="hidden_size"):
        read(hidden_size=value)
    with pytest.raises(CheckpointError, match="no multiple"):
        read(num_key_value_heads=3)


def test_linear_shapes_are_those_of_transformers() -> None:
    config = transformers.Qwen3Config(
        **{key: BASE[key] for key in BASE if key not in {"architectures", "torch_dtype"}},
        head_dim=24,
    )
    model = transformers.Qwen3ForCausalLM(config)
    ours = ModelConfig.from_dict(config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]})
    expected = {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if type(module).__name__ == "Linear" and name != "lm_head"
    }
    assert linear_shapes(ours) == expected


def test_facts_of_experts() -> None:
    mixtral, qwen = read(**MIXTRAL).moe, read(**QWEN3_MOE).moe
    assert mixtral is not None
    assert qwen is not None
    assert (mixtral.num_experts, mixtral.num_experts_per_token) == (8, 2)
    assert (mixtral.intermediate_size, mixtral.norm_topk_prob) == (128, True)
    assert (qwen.num_experts, qwen.intermediate_size, qwen.norm_topk_prob) == (5, 48, False)
    assert mixtral.names.expert(3)[2] == "block_sparse_moe.experts.3.w2"
    assert qwen.names.router == "mlp.gate"
    new = read(**QWEN3_MOE, num_local_experts=6)
    assert new.moe == qwen  # the key of the family counts


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, (True, True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3, 9]}, (False, True, True, False)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, (False, False, False, True)),
        ({"mlp_only_layers": None}, (True, True, True, True)),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], sparse: tuple[bool, ...]) -> None:
    config = read(**QWEN3_MOE | changes, num_hidden_layers=4)
    assert config.moe is not None
    assert config.moe.sparse_layers == sparse
    assert [config.is_sparse(layer) for layer in range(4)] == list(sparse)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "num_local_experts is None"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok 6 is more than the 5 experts"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is None"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers is '0'"),
        ({"mlp_only_layers": [True]}, r"mlp_only_layers is \[True\]"),
    ],
)
def test_senseless_experts_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(**QWEN3_MOE | changes)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_names_and_shapes_of_experts_are_those_of_the_file(tmp_path: Path, family: str) -> None:
    path = write_tiny(tmp_path / "model", family)
    config = ModelConfig.from_dict(json.loads((path / "config.json").read_text()))
    ours: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (outputs, inputs)
        for name, (inputs, outputs) in linear_shapes(config).items()
    }
    for layer in range(2):
        shapes = block_tensor_shapes(config, layer)
        ours |= {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if ".layers." in name]  # noqa: SIM118 - no dict
        assert ours == {name: tuple(file.get_slice(name).get_shape()) for name in names}


def test_facts_need_no_torch() -> None:
    code = "import sys, qinfer.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_null_means_the_default() -> None:
    config = read(rms_norm_eps=None, num_key_value_heads=None, head_dim=None, rope_parameters=None)
    assert (config.rms_norm_eps, config.num_kv_heads, config.head_dim) == (1e-6, 4, 16)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", -1.0),
        ("rope_parameters", [1]),
        ("rope_scaling", "linear"),
        ("head_dim", 0),
        ("head_dim", "16"),
        ("num_key_value_heads", 0),
    ],
)
def test_values_of_the_wrong_kind_are_named(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {key} is "):
        read(**{key: value})
