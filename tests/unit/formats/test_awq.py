import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.weights import gemm_tensors, random_weight, textbook

from qinfer.errors import CheckpointError
from qinfer.formats import gptq
from qinfer.formats.settings import ModuleFormat
from qinfer.formats.table import FORMATS, parse_settings
from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import WeightScheme


def read(tensors: dict[str, torch.Tensor], weight: QuantizedWeight) -> QuantizedWeight:
    back = FORMATS["awq"].from_tensors(
        tensors,
        ModuleFormat("awq", weight.scheme),
        in_features=weight.in_features,
        out_features=weight.out_features,
        name="layer",
    )
    assert isinstance(back, QuantizedWeight)
    return back


@given(
    group=st.sampled_from([16, 32, None]),
    out=st.sampled_from([8, 24, 64]),
    in_=st.sampled_from([32, 96]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_lanes_are_put_in_order(group, out, in_, seed) -> None:
    weight = random_weight(WeightScheme(4, group, symmetric=False), out, in_, seed=seed)
    back = read(gemm_tensors(weight), weight)
    assert torch.equal(back.codes, weight.codes)
    assert back.zeros is not None
    assert weight.zeros is not None
    assert torch.equal(back.zeros, weight.zeros)
    assert torch.equal(back.dequantize(), weight.dequantize())


def test_values_are_those_of_the_textbook() -> None:
    weight = random_weight(WeightScheme(4, 16, symmetric=False), 16, 32)
    assert torch.equal(read(gemm_tensors(weight), weight).dequantize(), textbook(weight))


@pytest.mark.parametrize(
    ("raw", "scheme"),
    [
        ({"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, 128),
        ({"bits": 4, "group_size": 64, "zero_point": True, "version": "gemm",
          "modules_to_not_convert": None}, 64),
        ({"bits": 4, "group_size": -1, "format": "gemm", "backend": "auto"}, None),
    ],
)  # fmt: skip
def test_settings_of_autoawq_and_transformers(raw, scheme) -> None:
    parsed = parse_settings({"quant_method": "awq", **raw})
    assert parsed.method == "awq"
    assert parsed.version == "gemm"
    assert parsed.scheme == WeightScheme(4, scheme, symmetric=False)
    assert parsed.scheme_for("lm_head") is None


def test_modules_that_are_left_out() -> None:
    raw = {"quant_method": "awq", "bits": 4, "group_size": 64}
    parsed = parse_settings(raw | {"modules_to_not_convert": ["mlp.gate", "layers.1."]})
    assert parsed.scheme_for("model.layers.0.mlp.gate") is None
    assert parsed.scheme_for("model.layers.1.self_attn.q_proj") is None
    assert parsed.scheme_for("model.layers.0.self_attn.q_proj") is not None
    assert parsed.scheme_for("lm_head") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "gemv"}, "interleaved for one GPU kernel; get .* gemm"),
        ({"version": "marlin"}, "repacked"),
        ({"version": "other"}, "qinfer reads gemm"),
        ({"bits": 8}, "bits is 8"),
        ({"bits": None}, "bits is None"),
        ({"group_size": 0}, "positive or -1"),
        ({"group_size": "128"}, "positive or -1"),
        ({"zero_point": False}, "zero_point is False"),
        ({"modules_to_not_convert": "lm_head"}, "must be a list of names"),
    ],
)
def test_what_is_not_read_says_why(change, message) -> None:
    base = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    with pytest.raises(CheckpointError, match=message):
        parse_settings(base | change)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("qweight", lambda t: t[:48], r"expected \(96, 8\)"),
        ("qweight", lambda t: t.float(), "expected int32"),
        ("qzeros", lambda t: t[:2], r"expected \(3, 8\); group_size 48 would fit"),
        ("qzeros", lambda t: t.long(), "expected int32"),
        ("scales", lambda t: t.int(), "expected floating point"),
        (
            "scales",
            lambda t: t.to(torch.float8_e4m3fn),
            "is float8_e4m3fn, expected floating point",
        ),
        ("scales", lambda t: t * float("inf"), "NaN or infinity"),
    ],
)
def test_f02_damaged_tensors(key, change, message) -> None:
    """F02: every damaged tensor is named."""
    weight = random_weight(WeightScheme(4, 32, symmetric=False))
    tensors = gemm_tensors(weight)
    with pytest.raises(CheckpointError, match=rf"layer\.{key}.*{message}"):
        read(tensors | {key: change(tensors[key])}, weight)
    del tensors[key]
    with pytest.raises(CheckpointError, match=rf"layer\.{key} is missing"):
        read(tensors, weight)


def test_gptq_tensors_under_awq_settings_are_recognized() -> None:
    weight = random_weight(WeightScheme(4, 32, symmetric=False))
    with pytest.raises(CheckpointError, match="that is GPTQ's layout"):
        read(gptq.to_tensors(weight, version="gptq_v2"), weight)
