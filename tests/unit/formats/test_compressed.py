from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.weights import bit_stream, random_weight, textbook

from qinfer.errors import CheckpointError, QuantizationError
from qinfer.formats import compressed, gptq
from qinfer.formats.settings import ModuleFormat
from qinfer.formats.table import FORMATS
from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import WeightScheme


def read(
    tensors: dict[str, torch.Tensor], weight: QuantizedWeight, layout: str = compressed.PACKED
) -> QuantizedWeight:
    back = FORMATS[layout].from_tensors(
        tensors,
        ModuleFormat(layout, weight.scheme),
        in_features=weight.in_features,
        out_features=weight.out_features,
        name="layer",
    )
    assert isinstance(back, QuantizedWeight)
    return back


schemes = st.builds(
    WeightScheme,
    bits=st.sampled_from([2, 3, 4, 8]),
    group_size=st.sampled_from([8, 32, None]),
    symmetric=st.booleans(),
)
dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])


@given(
    scheme=schemes,
    out=st.integers(1, 40),
    groups=st.integers(1, 3),
    width=st.integers(1, 45),
    dtype=dtypes,
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_round_trip_of_odd_shapes_keeps_every_value_and_type(
    scheme, out, groups, width, dtype, seed
) -> None:
    in_ = width if scheme.group_size is None else groups * scheme.group_size
    weight = random_weight(scheme, out, in_, seed=seed, dtype=dtype)
    tensors = compressed.to_packed(weight)
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert tensors["weight_scale"].dtype == dtype
    back = read(tensors, weight)
    assert back.scales.dtype == dtype
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.scales, weight.scales)
    assert (back.zeros is None) == scheme.symmetric
    assert back.group_index is None
    assert torch.equal(back.dequantize(), weight.dequantize())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_tensors_are_those_of_the_textbook(bits: int, symmetric) -> None:
    """`q + 2**(bits - 1)` as a dense bit stream: codes along the input, zeros along the output."""
    weight = random_weight(WeightScheme(bits, 8, symmetric=symmetric), out=13, in_=40)
    tensors = compressed.to_packed(weight)
    middle = 1 << (bits - 1)
    assert torch.equal(tensors["weight_packed"], bit_stream(weight.codes.int() + middle, bits))
    assert tensors["weight_shape"].dtype == torch.int64
    assert tensors["weight_shape"].tolist() == [13, 40]
    if symmetric:
        assert set(tensors) == {"weight_packed", "weight_scale", "weight_shape"}
    else:
        assert weight.zeros is not None
        expected = bit_stream(weight.zeros.T.int() + middle, bits).T
        assert torch.equal(tensors["weight_zero_point"], expected)
    assert torch.equal(read(tensors, weight).dequantize(), textbook(weight))


@given(
    scheme=st.builds(
        WeightScheme,
        bits=st.sampled_from([2, 3, 4, 8]),
        group_size=st.sampled_from([16, 32, None]),
        symmetric=st.booleans(),
    ),
    out=st.sampled_from([32, 64]),
    in_=st.sampled_from([32, 96]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_a_packed_weight_is_the_transpose_of_gptqs(scheme, out, in_, seed) -> None:
    weight = random_weight(scheme, out, in_, seed=seed)
    packed, other = compressed.to_packed(weight), gptq.to_tensors(weight, version="gptq_v2")
    assert torch.equal(packed["weight_packed"], other["qweight"].T)
    assert torch.equal(packed["weight_scale"], other["scales"].T)
    if not scheme.symmetric:
        assert torch.equal(packed["weight_zero_point"], other["qzeros"].T)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_scattered_groups_are_read_like_gptqs(bits: int, permuted) -> None:
    """`actorder: group`: `weight_g_idx` equals GPTQ's `g_idx`, and so do the weights."""
    weight = random_weight(WeightScheme(bits, 32, symmetric=False), out=32, in_=96)
    index = weight.column_groups().to(torch.int32)
    if permuted:
        index = index[torch.randperm(96, generator=torch.Generator().manual_seed(1))]
    tensors = compressed.to_packed(weight) | {"weight_g_idx": index}
    other = gptq.from_tensors(
        gptq.to_tensors(weight, version="gptq_v2") | {"g_idx": index},
        weight.scheme, in_features=96, out_features=32, version="gptq_v2", name="layer",
    )  # fmt: skip
    back = read(tensors, weight)
    assert torch.equal(back.dequantize(), other.dequantize())
    assert (back.group_index is not None) == permuted
    assert torch.equal(back.dequantize(), weight.dequantize()) != permuted


def test_a_group_index_that_was_never_set_means_groups_in_order() -> None:
    weight = random_weight(WeightScheme(4, 32))
    tensors = compressed.to_packed(weight) | {"weight_g_idx": torch.full((96,), -1)}
    assert torch.equal(read(tensors, weight).dequantize(), weight.dequantize())


@pytest.mark.parametrize("size", [31, 32, 64])
def test_three_bits_ten_to_a_word_are_read(size: int) -> None:
    """Files of before May 2026: word j holds codes 10 j to 10 j + 9, its top two bits are empty."""
    weight = random_weight(WeightScheme(3, None, symmetric=False), out=size, in_=size)
    assert weight.zeros is not None

    def sparse(rows: torch.Tensor) -> torch.Tensor:
        words = [
            [sum(code << 3 * i for i, code in enumerate(row[at : at + 10]))
             for at in range(0, len(row), 10)]
            for row in rows.tolist()
        ]  # fmt: skip
        return torch.tensor(words, dtype=torch.int32)

    tensors = compressed.to_packed(weight)
    assert tensors["weight_packed"].shape != sparse(weight.codes.int() + 4).shape
    tensors["weight_packed"] = sparse(weight.codes.int() + 4)
    tensors["weight_zero_point"] = sparse(weight.zeros.T.int() + 4).T
    assert torch.equal(read(tensors, weight).dequantize(), weight.dequantize())


def test_three_bit_codes_across_words() -> None:
    codes = torch.full((1, 32), -4, dtype=torch.int8)
    codes[0, [10, 21]] = 3  # unsigned 7, the others 0
    weight = QuantizedWeight(codes, torch.ones(1, 1).half(), WeightScheme(3, None))
    words = [int(word) & 0xFFFFFFFF for word in compressed.to_packed(weight)["weight_packed"][0]]
    assert words == [0xC0000000, 0x80000001, 0x00000003]


@pytest.mark.parametrize("shape", [(1,), (), (1, 1)])
def test_one_scale_for_the_whole_tensor(shape) -> None:
    weight = random_weight(WeightScheme(4, None))
    one = QuantizedWeight(weight.codes, torch.full((64, 1), 0.5).half(), weight.scheme)
    tensors = compressed.to_packed(weight) | {"weight_scale": torch.full(shape, 0.5).half()}
    assert torch.equal(read(tensors, weight).dequantize(), one.dequantize())


def test_int8_weights_per_row_and_per_tensor() -> None:
    """W8A8: the codes lie as they are."""
    weight = random_weight(WeightScheme(8, None), dtype=torch.bfloat16)
    tensors = compressed.to_int8(weight)
    assert {key: tensor.dtype for key, tensor in tensors.items()} == {
        "weight": torch.int8,
        "weight_scale": torch.bfloat16,
    }
    assert torch.equal(tensors["weight"], weight.codes)
    assert tensors["weight_scale"].shape == (64, 1)
    back = read(tensors | {"input_scale": torch.ones(1)}, weight, compressed.INT8)
    assert torch.equal(back.dequantize(), textbook(weight))
    per_tensor = tensors | {"weight_scale": torch.tensor([0.25])}
    back = read(per_tensor, weight, compressed.INT8)
    assert torch.equal(back.dequantize(), weight.codes * 0.25)


def test_int8_zero_points_lie_as_they_are() -> None:
    weight = random_weight(WeightScheme(8, None, symmetric=False))
    assert weight.zeros is not None
    tensors = {"weight": weight.codes, "weight_scale": weight.scales}
    stored = tensors | {"weight_zero_point": weight.zeros.to(torch.int8)}
    assert torch.equal(read(stored, weight, compressed.INT8).dequantize(), weight.dequantize())
    with pytest.raises(CheckpointError, match=r"layer\.weight_zero_point is missing"):
        read(tensors, weight, compressed.INT8)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (WeightScheme(4, None), "symmetric INT8"),
        (WeightScheme(8, 32), "symmetric INT8"),
        (WeightScheme(8, None, symmetric=False), "symmetric INT8"),
    ],
)
def test_other_weights_are_no_w8a8(scheme, message) -> None:
    with pytest.raises(QuantizationError, match=message):
        compressed.to_int8(random_weight(scheme))


def test_what_cannot_be_carried_is_refused() -> None:
    weight = random_weight(WeightScheme(4, 32))
    index = weight.column_groups().flip(0).to(torch.int32)
    for damaged, message in [
        (replace(weight, group_index=index), "scattered over the inputs"),
        (replace(weight, offsets=torch.ones(64, 3)), "real offsets"),
        (replace(weight, scales=weight.scales.double()), "float64"),
        (random_weight(WeightScheme(4, 32), in_=80), r"80 is not a multiple of group size 32"),
    ]:
        with pytest.raises(QuantizationError, match=message):
            compressed.to_packed(damaged)


def test_f02_wrong_settings_name_tensor_shapes_and_cause() -> None:
    """F02: bits or group size edited in the config."""
    tensors = compressed.to_packed(random_weight(WeightScheme(4, 32)))
    for scheme, message in [
        (WeightScheme(8, 32), r"weight_packed has shape .*4 bits would fit.*num_bits = 8"),
        (WeightScheme(4, 48), r"weight_scale has shape .*group_size 32 would fit.*say 48"),
        (WeightScheme(4, None), r"weight_scale has shape .*group_size 32 .*say channel"),
        (WeightScheme(4, 32, symmetric=False), r"weight_zero_point is missing"),
    ]:
        said = QuantizedWeight(torch.zeros(64, 96), torch.ones(1), scheme)
        with pytest.raises(CheckpointError, match=rf"layer\.{message}"):
            read(tensors, said)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("weight_packed", lambda t: t.float(), "expected int32"),
        ("weight_packed", lambda t: t[:32], r"has shape \(32, 12\), expected \(64, 12\)"),
        ("weight_packed", lambda t: t[0], r"expected \(64, 12\)"),
        ("weight_scale", lambda t: t.int(), "expected floating point"),
        ("weight_scale", lambda t: t * float("nan"), "NaN or infinity"),
        ("weight_shape", lambda t: t.flip(0), r"says \(96, 64\), expected \(64, 96\)"),
        ("weight_zero_point", lambda t: t.float(), "expected int32"),
        ("weight_zero_point", lambda t: t.T, r"expected \(8, 3\)"),
        ("weight_zero_point", lambda t: torch.full_like(t, 8, dtype=torch.int8), "-8 to 7"),
    ],
)
def test_f02_damaged_tensors(key, change, message) -> None:
    """F02: every damaged tensor is named."""
    weight = random_weight(WeightScheme(4, 32, symmetric=False))
    tensors = compressed.to_packed(weight)
    tensors[key] = change(tensors[key])
    with pytest.raises(CheckpointError, match=rf"layer\.{key}.*{message}"):
        read(tensors, weight)


def test_codes_of_another_width_than_the_settings_say() -> None:
    """They would change their neighbours when they are packed for a kernel."""
    weight = random_weight(WeightScheme(8, None))
    stored = ModuleFormat(compressed.INT8, WeightScheme(4, None))
    with pytest.raises(CheckpointError, match=r"layer\.weight holds .*, which 4 bits cannot"):
        compressed.from_int8(
            compressed.to_int8(weight), stored, in_features=96, out_features=64, name="layer"
        )


def test_zero_points_in_a_symmetric_checkpoint_are_refused() -> None:
    weight = random_weight(WeightScheme(4, 32, symmetric=False))
    symmetric = replace(weight, scheme=WeightScheme(4, 32))
    with pytest.raises(CheckpointError, match="symmetric = true"):
        read(compressed.to_packed(weight), symmetric)


@pytest.mark.parametrize("part", compressed.PACKED_TENSORS)
def test_a_missing_tensor_is_named(part: str) -> None:
    weight = random_weight(WeightScheme(4, 32))
    tensors = compressed.to_packed(weight)
    del tensors[part]
    with pytest.raises(CheckpointError, match=rf"layer\.{part} is missing"):
        read(tensors, weight)
