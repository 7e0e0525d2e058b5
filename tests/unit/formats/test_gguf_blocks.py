"""GGUF blocks as codes; the oracle is the `gguf` library, which dequantizes them."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_files import random_blocks

from qinfer.errors import CheckpointError
from qinfer.formats import gguf_blocks
from qinfer.formats.settings import ModuleFormat
from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import WeightScheme

CODE_TYPES = ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q8_0")


def blocks_of(name: str, out: int, in_features: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(random_blocks(name, out, in_features, seed))


def half(value: float) -> torch.Tensor:
    return torch.from_numpy(np.array([value], np.float16).view(np.uint8))


def read(blocks: torch.Tensor, name: str, in_features: int) -> QuantizedWeight:
    weight = gguf_blocks.from_tensors(
        {gguf_blocks.BLOCKS: blocks},
        ModuleFormat(gguf_blocks.LAYOUT, None, name),
        in_features=in_features,
        out_features=len(blocks),
        name="layer",
    )
    assert isinstance(weight, QuantizedWeight)
    return weight


def width(name: str, blocks: int) -> int:
    return blocks * GGML_QUANT_SIZES[GGMLQuantizationType[name]][0]


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(CODE_TYPES), st.integers(1, 5), st.integers(1, 4), st.integers(0, 999))
def test_codes_have_the_bits_of_the_library(name: str, out: int, blocks: int, seed: int) -> None:
    raw = blocks_of(name, out, width(name, blocks), seed)
    weight = read(raw, name, width(name, blocks))
    expected = quants.dequantize(raw.numpy(), GGMLQuantizationType[name])
    assert np.array_equal(weight.dequantize().numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_library_quantizes(name: str) -> None:
    dense = np.random.default_rng(1).standard_normal((6, 96)).astype(np.float32)
    raw = torch.from_numpy(quants.quantize(dense, GGMLQuantizationType[name]))
    error = np.abs(read(raw, name, 96).dequantize().numpy() - dense).max()
    assert error < {"4": 0.3, "5": 0.15, "8": 0.02}[name[1]]


@pytest.mark.parametrize(
    ("name", "scheme", "dtype"),
    [
        ("Q4_0", WeightScheme(4, 32), torch.float16),
        ("Q4_1", WeightScheme(4, 32, symmetric=False), torch.float16),
        ("Q4_K", WeightScheme(4, 32, symmetric=False), torch.float32),
        ("Q5_0", WeightScheme(8, 32), torch.float16),
        ("Q5_1", WeightScheme(8, 32, symmetric=False), torch.float16),
        ("Q5_K", WeightScheme(8, 32, symmetric=False), torch.float32),
        ("Q8_0", WeightScheme(8, 32), torch.float16),
    ],
)
def test_form_of_the_weight(name: str, scheme: WeightScheme, dtype: torch.dtype) -> None:
    in_features = width(name, 2)
    weight = read(blocks_of(name, 3, in_features), name, in_features)
    assert weight.scheme == scheme == gguf_blocks.scheme_of(name)
    assert weight.codes.shape == (3, in_features)
    assert weight.scales.shape == (3, in_features // 32)
    assert (weight.scales.dtype, weight.zeros) == (dtype, None)
    assert (weight.offsets is None) == scheme.symmetric
    assert weight.offsets is None or weight.offsets.dtype == torch.float32
    assert all(part.is_contiguous() for part in (weight.codes, weight.scales))


def test_types_without_a_scheme_are_dequantized() -> None:
    """Q6_K has a scale for 16 inputs, which no kernel has."""
    blocks = blocks_of("Q6_K", 4, 512)
    assert gguf_blocks.scheme_of("Q6_K") is None
    weight = gguf_blocks.from_blocks(blocks, "Q6_K", in_features=512, out_features=4, name="w")
    assert isinstance(weight, torch.Tensor)
    assert weight.dtype == torch.float32
    expected = quants.dequantize(blocks.numpy(), GGMLQuantizationType.Q6_K)
    assert torch.equal(weight, torch.from_numpy(expected))
    blocks[1, 208:210] = half(np.inf)
    with pytest.raises(CheckpointError, match="w holds NaN or infinity"):
        gguf_blocks.from_blocks(blocks, "Q6_K", in_features=512, out_features=4, name="w")


def test_block_types_and_sizes() -> None:
    names = [kind.name for kind in GGMLQuantizationType if gguf_blocks.is_block_type(kind.name)]
    assert {"Q4_0", "Q6_K", "IQ4_NL"} < set(names)
    assert not {"F32", "F16", "BF16", "I8", "nonsense"} & {*names}
    assert not gguf_blocks.is_block_type("nonsense")
    assert gguf_blocks.row_bytes("Q4_K", 512) == 2 * 144
    assert gguf_blocks.row_bytes("Q4_K", 576) is None
    for name, num_bytes, weights in (("Q4_K", 2 * 144, 512), ("Q4_1", 40, 64)):
        stored = ModuleFormat(gguf_blocks.LAYOUT, gguf_blocks.scheme_of(name), name)
        assert gguf_blocks.count_codes(num_bytes, stored) == weights


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_damaged_scales(position: int, value: float) -> None:
    blocks = blocks_of("Q4_K", 2, 256)
    blocks[1, 2 * position : 2 * position + 2] = half(value)
    with pytest.raises(CheckpointError, match=r"layer\.gguf_blocks holds a scale of NaN"):
        read(blocks, "Q4_K", 256)


@pytest.mark.parametrize(
    ("blocks", "name", "in_features", "message"),
    [
        (torch.zeros(4, 36, dtype=torch.uint8), "Q4_0", 96, r"\(4, 36\).*of shape \(4, 54\)"),
        (torch.zeros(4, 54, dtype=torch.int8), "Q4_0", 96, "torch.int8"),
        (torch.zeros(4, 144, dtype=torch.uint8), "Q4_K", 288, "of shape .4, None."),
        (torch.zeros(4, 192), "F16", 96, "'F16', which is no block type"),
        (torch.zeros(4, 192), "Q4_K_M", 96, "'Q4_K_M', which is no block type"),
    ],
)
def test_refusals(blocks: torch.Tensor, name: str, in_features: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(blocks, name, in_features)


def test_settings_survive_a_round_trip() -> None:
    types = {
        "model.layers.1.mlp.up_proj": "Q4_K",
        "model.layers.11.mlp.up_proj": "Q6_K",
        "model.layers.11.mlp.down_proj": "Q4_K",
    }
    found = gguf_blocks.parse_config(gguf_blocks.config(types))
    assert (found.method, found.default) == ("gguf", None)
    for module, type_name in types.items():
        stored = found.module_format(module)
        assert stored is not None
        assert (stored.layout, stored.variant) == (gguf_blocks.LAYOUT, type_name)
        assert stored.scheme == gguf_blocks.scheme_of(type_name)
    assert found.module_format("model.layers.1.mlp.up_proj2") is None
    assert found.module_format("lm_head") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "this qinfer reads 1"),
        ({"types": ["Q4_0"]}, "must be an object"),
        ({"types": {"a": "F32"}}, "a has type 'F32'"),
        ({"types": {"a": None}}, "a has type None"),
    ],
)
def test_settings_that_cannot_be(changes: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        gguf_blocks.parse_config(gguf_blocks.config({"a": "Q4_0"}) | changes)
