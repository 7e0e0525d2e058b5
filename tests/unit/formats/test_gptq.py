import logging
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import weights
from support.gptq_reader import dequantize_layer

from qinfer.errors import CheckpointError, QuantizationError
from qinfer.formats import gptq
from qinfer.formats.packing import pack
from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import WeightScheme

random_weight = partial(weights.random_weight, min_zero=1)


def read(
    tensors: dict[str, torch.Tensor], weight: QuantizedWeight, version: str
) -> QuantizedWeight:
    return gptq.from_tensors(
        tensors,
        weight.scheme,
        in_features=weight.in_features,
        out_features=weight.out_features,
        version=version,
        name="layer",
    )


def dense(tensors: dict[str, torch.Tensor], weight: QuantizedWeight, version: str) -> torch.Tensor:
    """Dequantize with the independent reader."""
    arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
    config = {"checkpoint_format": version, "group_size": weight.scheme.group_size or -1}
    return torch.from_numpy(dequantize_layer(arrays, config, weight.scheme.bits))


V1 = {2: [0x55555555] * 3, 3: [0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D], 4: [0x77777777] * 3,
      8: [0x7F7F7F7F] * 3}  # fmt: skip
V2 = {2: [0xAAAAAAAA] * 3, 3: [0x24924924, 0x49249249, 0x92492492], 4: [0x88888888] * 3,
      8: [0x80808080] * 3}  # fmt: skip


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("version", "vectors"), [("gptq", V1), ("gptq_v2", V2)])
def test_symmetric_zero_points_are_the_published_words(bits, version, vectors) -> None:
    tensors = gptq.to_tensors(random_weight(WeightScheme(bits, 32), out=96), version=version)
    words = [int(word) & 0xFFFFFFFF for word in tensors["qzeros"][0, :3]]
    assert words == vectors[bits]
    assert gptq.detect_symmetric(tensors["qzeros"], bits)


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    group=st.sampled_from([16, 32, None]),
    symmetric=st.booleans(),
    out=st.sampled_from([32, 64]),
    in_=st.sampled_from([32, 96]),
    permuted=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_round_trip_equals_the_independent_reader(
    bits, group, symmetric, out, in_, permuted, seed
) -> None:
    scheme = WeightScheme(bits, group, symmetric=symmetric)
    weight = random_weight(scheme, out, in_, seed=seed, min_zero=0)
    if permuted:
        order = torch.randperm(in_, generator=torch.Generator().manual_seed(seed))
        index = weight.column_groups()[order].to(torch.int32)
        weight = QuantizedWeight(weight.codes, weight.scales, scheme, weight.zeros, index)
    version = gptq.preferred_version(scheme)
    tensors = gptq.to_tensors(weight, version=version)
    assert {key: tensor.dtype for key, tensor in tensors.items()} == {
        "qweight": torch.int32,
        "qzeros": torch.int32,
        "scales": torch.float16,
        "g_idx": torch.int32,
    }
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    back = read(tensors, weight, version)
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.dequantize(), weight.dequantize())
    assert torch.equal(dense(tensors, weight, version), weight.dequantize())
    trivial = torch.equal(weight.column_groups(), torch.arange(in_) // (group or in_))
    assert (back.group_index is None) == trivial


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_v1_and_v2_of_a_symmetric_layer_differ_in_zero_points_only(bits: int) -> None:
    """G08: both are read to the same weight."""
    weight = random_weight(WeightScheme(bits, 32))
    v1, v2 = (gptq.to_tensors(weight, version=v) for v in ("gptq", "gptq_v2"))
    assert [key for key in v1 if not torch.equal(v1[key], v2[key])] == ["qzeros"]
    assert torch.equal(read(v1, weight, "gptq").dequantize(), weight.dequantize())
    assert torch.equal(read(v2, weight, "gptq_v2").dequantize(), weight.dequantize())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("written", "label"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_g08_mislabelled_symmetric_file_is_corrected(written, label, symmetric, caplog) -> None:
    """G08: constant zero points betray the variant, whatever the label and `sym` say."""
    weight = random_weight(WeightScheme(4, 32))
    tensors = gptq.to_tensors(weight, version=written)
    said = QuantizedWeight(weight.codes, weight.scales, WeightScheme(4, 32, symmetric=symmetric))
    with caplog.at_level(logging.WARNING):
        back = read(tensors, said, label)
    assert torch.equal(back.dequantize(), weight.dequantize())
    assert f"format {written} although the settings say {label}" in caplog.text


def test_g08_a_right_label_is_silent(caplog) -> None:
    weight = random_weight(WeightScheme(4, 32))
    read(gptq.to_tensors(weight, version="gptq"), weight, "gptq")
    assert not caplog.records


def test_three_bit_v1_of_gptqmodel_is_recognized() -> None:
    weight = random_weight(WeightScheme(3, 32))
    tensors = gptq.to_tensors(weight, version="gptq")
    tensors["qzeros"] = torch.zeros_like(tensors["qzeros"])  # subtracts 0x24924924, not ones
    assert torch.equal(read(tensors, weight, "gptq").dequantize(), weight.dequantize())


def test_asymmetric_zero_points_in_a_symmetric_checkpoint_are_refused() -> None:
    weight = random_weight(WeightScheme(4, 32, symmetric=False))
    tensors = gptq.to_tensors(weight, version="gptq_v2")
    symmetric = QuantizedWeight(weight.codes, weight.scales, WeightScheme(4, 32))
    with pytest.raises(CheckpointError, match=r"layer\.qzeros .* set sym to false"):
        read(tensors, symmetric, "gptq_v2")


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_asymmetric_v1_round_trip_without_zero_points_of_zero(bits: int, caplog) -> None:
    weight = random_weight(WeightScheme(bits, 32, symmetric=False))
    tensors = gptq.to_tensors(weight, version="gptq")
    assert torch.equal(read(tensors, weight, "gptq").dequantize(), weight.dequantize())
    assert not caplog.records


def test_asymmetric_v1_with_a_zero_point_of_zero_is_not_written() -> None:
    weight = random_weight(WeightScheme(4, 32, symmetric=False), min_zero=0)
    assert weight.zeros is not None
    weight.zeros[0, 0] = -8
    with pytest.raises(QuantizationError, match="gptq_v2"):
        gptq.to_tensors(weight, version="gptq")


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_asymmetric_v1_is_read_on_the_word_as_gptqmodel_writes_it(bits: int, caplog) -> None:
    """Subtracting ones from the packed word borrows across fields; adding them gives it back."""
    weight = random_weight(WeightScheme(bits, 32, symmetric=False), min_zero=0, seed=3)
    assert weight.zeros is not None
    assert (weight.zeros == -(1 << (bits - 1))).any() or bits == 8
    weight.zeros[5, 1] = -(1 << (bits - 1))
    tensors = gptq.to_tensors(weight, version="gptq_v2")
    ones = sum(1 << shift for shift in range(0, 32, bits))
    unsigned = tensors["qzeros"].numpy().astype(np.int64) & 0xFFFFFFFF
    tensors["qzeros"] = torch.from_numpy(((unsigned - ones) & 0xFFFFFFFF).astype(np.uint32)).view(
        torch.int32
    )
    back = read(tensors, weight, "gptq")
    assert torch.equal(back.dequantize(), weight.dequantize())
    assert "which other programs read differently" in caplog.text


def test_asymmetric_three_bit_v1_is_refused() -> None:
    weight = random_weight(WeightScheme(3, 32, symmetric=False))
    with pytest.raises(CheckpointError, match="write differently"):
        read(gptq.to_tensors(weight, version="gptq"), weight, "gptq")


def test_g12_one_group_per_row() -> None:
    """G12: group size -1 whatever the width; the reload is bit-equal."""
    weight = random_weight(WeightScheme(4, None), out=64, in_=200)
    tensors = gptq.to_tensors(weight, version="gptq")
    assert tensors["scales"].shape == (1, 64)
    assert tensors["qweight"].abs().max() > 0
    back = read(tensors, weight, "gptq")
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.scales, weight.scales)


def test_group_as_wide_as_the_input() -> None:
    weight = random_weight(WeightScheme(4, 96))
    back = read(gptq.to_tensors(weight, version="gptq"), weight, "gptq")
    assert torch.equal(back.dequantize(), weight.dequantize())


def test_g10_short_last_group_is_read_but_not_written() -> None:
    """G10: in_features 80 with groups of 32: three groups, the last of 16."""
    scheme = WeightScheme(4, 32)
    weight = random_weight(scheme, out=32, in_=80)
    with pytest.raises(QuantizationError, match=r"80 is not a multiple of group size 32 \(2\.5"):
        gptq.to_tensors(weight, version="gptq")
    tensors = {
        "qweight": pack(weight.codes.T.int() + 8, 4, 0),
        "qzeros": pack(torch.full((3, 32), 7), 4, 1),
        "scales": weight.scales.T.contiguous(),
    }
    back = read(tensors, weight, "gptq")
    assert back.group_index is None
    assert torch.equal(back.dequantize(), weight.dequantize())
    assert torch.equal(dense(tensors, weight, "gptq"), weight.dequantize())


def test_g13_group_index_absent_permuted_and_negative() -> None:
    """G13: a missing g_idx means groups in order; another one is honoured, not dropped."""
    weight = random_weight(WeightScheme(4, 32), out=32, in_=128)
    tensors = gptq.to_tensors(weight, version="gptq")
    sequential = {key: tensor for key, tensor in tensors.items() if key != "g_idx"}
    assert torch.equal(read(sequential, weight, "gptq").dequantize(), weight.dequantize())

    order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    scattered = tensors | {"g_idx": tensors["g_idx"][order].contiguous()}
    back = read(scattered, weight, "gptq")
    assert back.group_index is not None
    assert torch.equal(back.dequantize(), dense(scattered, weight, "gptq"))
    assert not torch.equal(back.dequantize(), weight.dequantize())

    negative = scattered | {"g_idx": scattered["g_idx"] - 4}
    assert torch.equal(read(negative, weight, "gptq").dequantize(), back.dequantize())


def test_g13_group_index_out_of_range() -> None:
    weight = random_weight(WeightScheme(4, 32))
    tensors = gptq.to_tensors(weight, version="gptq")
    tensors["g_idx"][7] = 9
    with pytest.raises(CheckpointError, match=r"layer\.g_idx names group 9 although there are 3"):
        read(tensors, weight, "gptq")


@pytest.mark.parametrize(
    ("scheme", "key", "hint"),
    [
        (WeightScheme(8, 32), "qweight", "4 bits would fit, the settings say bits = 8"),
        (WeightScheme(4, 48), "scales", "group_size 32 would fit, the settings say group_size"),
        (WeightScheme(4, None), "scales", "group_size 32 would fit.*group_size = -1"),
    ],
)
def test_f02_wrong_settings_name_tensor_shapes_and_cause(scheme, key, hint) -> None:
    """F02: bits or group size edited in the config."""
    weight = random_weight(WeightScheme(4, 32))
    tensors = gptq.to_tensors(weight, version="gptq")
    said = QuantizedWeight(weight.codes, weight.scales, scheme)
    with pytest.raises(CheckpointError, match=rf"layer\.{key} has shape \(.*expected \(.*{hint}"):
        read(tensors, said, "gptq")


@pytest.mark.parametrize(
    ("key", "change", "hint"),
    [
        ("qzeros", lambda t: t.repeat(1, 8), "seem not to be packed"),
        ("qweight", lambda t: t[:, :32].contiguous(), "implies 64 output features"),
        ("qweight", lambda t: t.float(), "expected int32"),
        ("qweight", lambda t: t.long(), "is int64, expected int32"),
        ("qzeros", lambda t: t.long(), "is int64, expected int32"),
        ("scales", lambda t: t.int(), "expected floating point"),
        (
            "scales",
            lambda t: t.to(torch.float8_e4m3fn),
            "is float8_e4m3fn, expected floating point",
        ),
        ("scales", lambda t: t.double(), "is float64, expected floating point"),
        ("scales", lambda t: t * float("nan"), "NaN or infinity"),
        ("g_idx", lambda t: t[:50].contiguous(), r"expected \(96,\)"),
        ("g_idx", lambda t: t.float(), "expected int32"),
        ("g_idx", lambda t: t.long() + 2**32, "names group 4294967296"),
        ("qzeros", lambda t: t[0], r"has shape \(8,\)"),
    ],
)
def test_f02_damaged_tensors(key, change, hint) -> None:
    """F02: every damaged tensor is named."""
    weight = random_weight(WeightScheme(4, 32))
    tensors = gptq.to_tensors(weight, version="gptq")
    tensors[key] = change(tensors[key])
    with pytest.raises(CheckpointError, match=rf"layer\.{key}.*{hint}"):
        read(tensors, weight, "gptq")


def test_a_missing_tensor_is_named() -> None:
    weight = random_weight(WeightScheme(4, 32))
    tensors = gptq.to_tensors(weight, version="gptq")
    del tensors["scales"]
    with pytest.raises(CheckpointError, match=r"layer\.scales is missing"):
        read(tensors, weight, "gptq")


@pytest.mark.parametrize(
    ("in_", "out", "scheme", "expected"),
    [
        (576, 1536, WeightScheme(4, 64), None),
        (40, 48, WeightScheme(4, None), None),
        (48, 40, WeightScheme(8, 16), None),
        (576, 576, WeightScheme(4, 128), "in_features 576 is not a multiple of group size 128"),
        (40, 48, WeightScheme(3, None), "in_features 40 x 3 bits"),
        (96, 40, WeightScheme(3, None), "out_features 40 x 3 bits"),
        (32, 36, WeightScheme(4, 32), "out_features 36 x 4 bits"),
    ],
)
def test_g10_g11_misfit_names_the_dimension_at_fault(in_, out, scheme, expected) -> None:
    """G10, G11: known before calibration, with the dimension and the group size."""
    problem = gptq.misfit(in_, out, scheme)
    assert (problem is None) if expected is None else (problem or "").startswith(expected)


@pytest.mark.parametrize(("in_", "out"), [(40, 48), (48, 40)])
def test_g11_dimensions_that_are_no_multiple_of_32(in_: int, out: int) -> None:
    """G11: exact where words are full; refused with the right dimension where they are not."""
    weight = random_weight(WeightScheme(4, None), out=out, in_=in_)
    back = read(gptq.to_tensors(weight, version="gptq"), weight, "gptq")
    assert back.codes.shape == (out, in_)
    assert torch.equal(back.dequantize(), weight.dequantize())
    with pytest.raises(
        QuantizationError,
        match="out_features 40 x 3 bits" if out == 40 else "in_features 40 x 3 bits",
    ):
        gptq.to_tensors(random_weight(WeightScheme(3, None), out=out, in_=in_), version="gptq")


def test_scales_that_overflow_float16_are_not_written() -> None:
    weight = random_weight(WeightScheme(4, 32))
    huge = QuantizedWeight(weight.codes, weight.scales.float() * 1e6, weight.scheme)
    with pytest.raises(QuantizationError, match="not finite in float16"):
        gptq.to_tensors(huge, version="gptq")
