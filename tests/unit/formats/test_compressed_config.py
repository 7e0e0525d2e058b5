import json

import pytest

from qinfer.errors import CheckpointError
from qinfer.formats.compressed import INT8, PACKED
from qinfer.formats.compressed_config import config
from qinfer.formats.settings import ModuleFormat
from qinfer.formats.table import parse_settings
from qinfer.schemes import WeightScheme

WEIGHTS = {
    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128,
    "block_structure": None, "dynamic": False, "actorder": None, "observer": "minmax",
    "observer_kwargs": {},
}  # fmt: skip
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
Q_PROJ = "model.layers.3.self_attn.q_proj"


def group(targets=("Linear",), **changes) -> dict:
    return {"targets": list(targets), "weights": WEIGHTS | changes, "input_activations": None}


def raw(groups: dict, **changes) -> dict:
    base = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return base | {"config_groups": groups} | changes


def test_a_file_of_llm_compressor_0_1() -> None:
    """No `format` in groups, no `scale_dtype`, no `version`."""
    settings = parse_settings(raw({"group_0": group(actorder="static")}))
    assert settings.method == "compressed-tensors"
    assert settings.version == "pack-quantized"
    assert settings.scheme == WeightScheme(4, 128, act_order=True)
    assert settings.module_format(Q_PROJ) == ModuleFormat(PACKED, settings.scheme)
    assert settings.module_format("lm_head") is None


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [
        ({"strategy": "channel", "group_size": None}, WeightScheme(4, None)),
        ({"strategy": None, "group_size": -1}, WeightScheme(4, None)),
        ({"strategy": None, "group_size": None}, WeightScheme(4, None)),
        ({"strategy": None, "group_size": 32}, WeightScheme(4, 32)),
        ({"strategy": "tensor", "group_size": None, "num_bits": 8}, WeightScheme(8, None)),
        ({"symmetric": False, "num_bits": 3}, WeightScheme(3, 128, symmetric=False)),
        ({"actorder": "group"}, WeightScheme(4, 128, act_order=True)),
        ({"actorder": True}, WeightScheme(4, 128, act_order=True)),
        ({"type": "INT", "strategy": "GROUP"}, WeightScheme(4, 128)),
    ],
)
def test_strategies_and_their_old_spellings(changes, scheme) -> None:
    assert parse_settings(raw({"g": group(**changes)})).scheme == scheme


def test_names_come_before_expressions_and_those_before_classes() -> None:
    groups = {
        "a": group(["Linear"]),
        "b": group([r"re:.*q_proj$"], num_bits=8),
        "c": group([Q_PROJ, "lm_head"], num_bits=2),
    }
    settings = parse_settings(raw(groups, ignore=[r"re:.*down_proj", "model.layers.1.mlp.up_proj"]))
    bits = {
        "model.layers.0.self_attn.k_proj": 4,
        "model.layers.0.self_attn.q_proj": 8,
        Q_PROJ: 2,
        "lm_head": 2,
        "model.layers.1.mlp.down_proj": None,
        "model.layers.1.mlp.up_proj": None,
        "model.layers.1.mlp.up_proj2": 4,
    }
    found = {name: settings.scheme_for(name) for name in bits}
    assert {name: scheme and scheme.bits for name, scheme in found.items()} == bits
    assert settings.scheme == WeightScheme(4, 128)


def test_dots_of_a_name_are_no_wildcards() -> None:
    settings = parse_settings(raw({"a": group(["a.b"])}, ignore=None))
    assert settings.scheme_for("a.b") is not None
    assert settings.scheme_for("axb") is None
    assert settings.scheme_for("a.bc") is None


def test_w8a8_and_mixed_precision() -> None:
    """Each group its own layout; where old files leave it out, quantized inputs tell."""
    w8 = group([r"re:.*q_proj"], num_bits=8, strategy="channel", group_size=None)
    groups = {"a": group(), "b": w8 | {"input_activations": TOKENS}}
    explicit = {"a": groups["a"] | {"format": PACKED}, "b": groups["b"] | {"format": INT8}}
    for variant in (groups, explicit):
        settings = parse_settings(raw(variant, format="mixed-precision"))
        assert settings.version == "mixed-precision"
        assert settings.module_format(Q_PROJ) == ModuleFormat(INT8, WeightScheme(8, None))
        up_proj = settings.module_format("model.layers.0.mlp.up_proj")
        assert up_proj == ModuleFormat(PACKED, WeightScheme(4, 128))
    only = parse_settings(raw({"b": explicit["b"]}, format="int-quantized"))
    assert only.formats == (ModuleFormat(INT8, WeightScheme(8, None)),)


def test_a_checkpoint_with_a_quantized_cache_alone_quantizes_no_weight() -> None:
    settings = parse_settings(raw({}, kv_cache_scheme={"num_bits": 8, "type": "float"}))
    assert settings.formats == ()
    assert settings.scheme is None
    assert settings.scheme_for(Q_PROJ) is None


@pytest.mark.parametrize(
    ("groups", "changes", "message"),
    [
        ({"g": group()}, {"format": "float-quantized"}, "weights are FP8"),
        ({"g": group(type="float", num_bits=8)}, {}, "8-bit numbers of type 'float'"),
        ({"g": group()}, {"format": "nvfp4-pack-quantized"}, "NVFP4"),
        ({"g": group()}, {"format": "mxfp4-pack-quantized"}, "MXFP4"),
        ({"g": group()}, {"format": "marlin-24"}, "2:4 sparse"),
        ({"g": group()}, {"format": "dense"}, "not compressed"),
        ({"g": group()}, {"format": "other"}, "reads pack-quantized, int-quantized"),
        ({"g": group()}, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse storage"),
        ({"g": group()}, {"transform_config": {"config_groups": {"u": {}}}}, "rotations"),
        ({"g": group(num_bits=5)}, {}, r"g\.weights\.num_bits is 5"),
        ({"g": group(num_bits=4.0)}, {}, r"num_bits is 4\.0"),
        ({"g": group()}, {"format": ["pack-quantized"]}, "qinfer reads pack-quantized"),
        ({"a": group(), "b": group(num_bits=8)}, {}, r"b targets 'Linear' as int8 .*says int4"),
        ({"a": group(["m"]), "b": group(["m"], num_bits=8)}, {}, r"b targets 'm' as int8"),
        ({"g": group(group_size=0)}, {}, "must be a positive integer"),
        ({"g": group(group_size="128")}, {}, "group_size is '128'; it must be a positive"),
        ({"g": group(strategy="block")}, {}, "reads group, channel and tensor"),
        ({"g": group(dynamic=True)}, {}, "weights are static"),
        ({"g": group(symmetric="yes")}, {}, "true or false"),
        ({"g": group(["re:["])}, {}, "no regular expression"),
        ({"g": group()}, {"ignore": ["re:["]}, "ignore: 're:\\['"),
        ({"g": group()}, {"ignore": "lm_head"}, "list of strings"),
        ({"W4A16": ["Linear"]}, {}, "no names of presets"),
        ({"g": {"targets": ["Linear"], "weights": 4}}, {}, "must be an object"),
        (None, {}, "config_groups is missing"),
    ],
)  # fmt: skip
def test_what_is_not_read_says_why(groups, changes, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_settings(raw(groups, **changes))


def test_written_settings_are_the_documented_ones() -> None:
    written = config({WeightScheme(4, 128): ["Linear"]}, ignore=["lm_head"])
    assert written == {
        "quant_method": "compressed-tensors", "version": "0.20.0", "format": "pack-quantized",
        "quantization_status": "compressed", "global_compression_ratio": None,
        "config_groups": {"group_0": {
            "targets": ["Linear"], "format": "pack-quantized",
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "group_size": 128,
                "strategy": "group", "block_structure": None, "dynamic": False, "actorder": None,
                "scale_dtype": None, "zp_dtype": None, "observer": "memoryless_minmax",
                "observer_kwargs": {},
            },
            "input_activations": None, "output_activations": None,
        }},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "sparsity_config": {},
        "transform_config": {},
    }  # fmt: skip


def test_written_settings_are_read_back() -> None:
    asym = WeightScheme(3, 64, symmetric=False, act_order=True)
    groups = {WeightScheme(4, None): ["Linear"], asym: ["a.q_proj", "b.q_proj"]}
    settings = parse_settings(json.loads(json.dumps(config(groups, ignore=["lm_head"]))))
    assert settings.scheme == WeightScheme(4, None)
    assert settings.scheme_for("b.q_proj") == asym
    assert settings.scheme_for("lm_head") is None


def test_written_w8a8_quantizes_inputs_per_token() -> None:
    written = config({WeightScheme(8, None): ["Linear"]}, ignore=[], layout=INT8)
    assert written["format"] == "int-quantized"
    inputs = written["config_groups"]["group_0"]["input_activations"]
    assert {key: inputs[key] for key in TOKENS} == TOKENS
    assert parse_settings(written).formats == (ModuleFormat(INT8, WeightScheme(8, None)),)
