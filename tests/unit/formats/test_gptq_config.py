import pytest

from qinfer.errors import CheckpointError, ConfigError
from qinfer.formats.gptq_config import config, parse_config, preferred_version
from qinfer.formats.table import parse_settings
from qinfer.schemes import WeightScheme

AUTO_GPTQ = {  # AutoGPTQ 0.7: no format, everything at the top level
    "bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": True, "static_groups": False,
    "sym": True, "true_sequential": True, "model_name_or_path": None,
    "model_file_base_name": None, "quant_method": "gptq", "checkpoint_format": "gptq",
}  # fmt: skip
THE_BLOKE = {  # 2023, quantize_config.json only, no quant_method
    "bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": False, "sym": True,
    "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model",
}  # fmt: skip
GPTQMODEL = {
    "bits": 4, "dynamic": {"-:.*down_proj": {}, "+:model.layers.0.": {"bits": 8, "group_size": 32},
                           "model.layers.1.": {"sym": False}},
    "group_size": 64, "desc_act": False, "lm_head": True, "method": "gptq", "quant_method": "gptq",
    "format": "gptq_v2", "checkpoint_format": "gptq_v2", "pack_dtype": "int32", "sym": True,
    "meta": {"quantizer": ["gptqmodel:7.0.0"], "damp_percent": 0.05}, "rotation": None,
}  # fmt: skip
TRANSFORMERS = {  # GPTQConfig.to_dict() of transformers 5
    "quant_method": "gptq", "bits": 8, "tokenizer": None, "dataset": None, "group_size": -1,
    "damp_percent": 0.1, "desc_act": False, "act_group_aware": True, "sym": True,
    "true_sequential": True, "format": "gptq", "checkpoint_format": "gptq", "meta": None,
    "backend": None, "model_seqlen": None, "block_name_to_quantize": None, "batch_size": 1,
    "module_name_preceding_first_block": None, "pad_token_id": None, "max_input_length": None,
    "use_exllama": True, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "scheme", "version"),
    [
        (AUTO_GPTQ, WeightScheme(4, 128, act_order=True), "gptq"),
        (THE_BLOKE, WeightScheme(4, 128), "gptq"),
        (GPTQMODEL, WeightScheme(4, 64), "gptq_v2"),
        (TRANSFORMERS, WeightScheme(8, None), "gptq"),
        ({"w_bit": 4, "q_group_size": 32}, WeightScheme(4, 32), "gptq"),
    ],
)
def test_spellings_in_the_wild(raw, scheme, version) -> None:
    settings = parse_settings(raw)
    assert settings.method == "gptq"
    assert settings.scheme == scheme
    assert settings.version == version
    assert settings.raw == raw


def test_dynamic_overrides_take_the_first_match() -> None:
    settings = parse_config(GPTQMODEL)
    assert settings.scheme_for("model.layers.0.mlp.down_proj") is None
    assert settings.scheme_for("model.layers.0.mlp.up_proj") == WeightScheme(8, 32)
    assert settings.scheme_for("model.layers.1.mlp.up_proj") == WeightScheme(4, 64, symmetric=False)
    assert settings.scheme_for("model.layers.2.mlp.up_proj") == WeightScheme(4, 64)
    assert settings.scheme_for("lm_head") == WeightScheme(4, 64)


def test_module_lists_and_the_head() -> None:
    settings = parse_config(TRANSFORMERS)
    assert settings.scheme_for("model.layers.3.self_attn.q_proj") == WeightScheme(8, None)
    assert settings.scheme_for("model.layers.3.self_attn.k_proj") is None
    assert settings.scheme_for("lm_head") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "marlin"}, "repacked for one GPU kernel"),
        ({"is_marlin_format": True}, "repacked for one GPU kernel"),
        ({"quant_method": "marlin"}, "repacked for one GPU kernel"),
        ({"checkpoint_format": "gptq_p"}, "bit-plane"),
        ({"format": "other"}, "gptq and gptq_v2"),
        ({"format": ["gptq"]}, "gptq and gptq_v2"),
        ({"modules_in_block_to_quantize": [[1, 2]]}, "must hold names"),
        ({"pack_dtype": "int64"}, "int32"),
        ({"bits": 5}, "bits is 5"),
        ({"bits": "four"}, "must be an integer"),
        ({"bits": None}, "bits is missing"),
        ({"group_size": None}, "group_size is missing"),
        ({"group_size": 0}, "positive or -1"),
        ({"sym": "yes"}, "true or false"),
        ({"dynamic": {"+:[": {"bits": 8}}}, "no regular expression"),
        ({"dynamic": {"+:x": {"bits": 7}}}, "bits is 7"),
        ({"dynamic": {"+:x": 8}}, "must be an object"),
        ({"dynamic": [1]}, "must be an object"),
        ({"modules_in_block_to_quantize": "q_proj"}, "must be a list"),
        ({"quant_method": "quip"}, "'quip' is not supported; qinfer reads gptq"),
    ],
)
def test_what_is_not_read_says_why(change, message) -> None:
    base = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    with pytest.raises(CheckpointError, match=message):
        parse_settings(base | change)


def test_written_settings_are_the_documented_minimum() -> None:
    written = config(
        WeightScheme(4, 128), version="gptq", meta={"damp_percent": 0.05, "true_sequential": True}
    )
    assert written["meta"].pop("quantizer")[0].startswith("qinfer:")
    assert written == {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
        "lm_head": False, "checkpoint_format": "gptq", "format": "gptq", "pack_dtype": "int32",
        "meta": {"static_groups": False, "damp_percent": 0.05, "true_sequential": True},
    }  # fmt: skip


@pytest.mark.parametrize("scheme", [WeightScheme(4, None), WeightScheme(8, 32, symmetric=False),
                                    WeightScheme(3, 64, act_order=True)])  # fmt: skip
def test_written_settings_are_read_back(scheme: WeightScheme) -> None:
    overrides = {r"model\.layers\.1\.": None, r".*q_proj$": WeightScheme(8, None, symmetric=False)}
    if scheme.symmetric:
        overrides[r".*q_proj$"] = WeightScheme(8, None, act_order=scheme.act_order)
    settings = parse_config(config(scheme, version=preferred_version(scheme), overrides=overrides))
    assert settings.scheme == scheme
    assert settings.version == ("gptq" if scheme.symmetric else "gptq_v2")
    assert settings.scheme_for("model.layers.1.self_attn.q_proj") is None
    assert settings.scheme_for("model.layers.0.self_attn.q_proj") == overrides[r".*q_proj$"]


def test_asymmetric_override_of_a_v1_checkpoint_is_refused() -> None:
    overrides = {".*": WeightScheme(8, 32, symmetric=False)}
    with pytest.raises(ConfigError, match="gptq_v2"):
        config(WeightScheme(4, 32), version="gptq", overrides=overrides)
