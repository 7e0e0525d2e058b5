"""bitsandbytes' layouts; the oracles are its own functions and the values in the QLoRA paper."""

import json

import pytest
import torch
from bitsandbytes import functional
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.errors import CheckpointError
from qinfer.formats import bnb

# QLoRA (arXiv 2305.14314), appendix E.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0]  # fmt: skip
# Rows do not end with blocks. Multiples of 32 that are none of the block size will not do here:
# bitsandbytes 0.50 dequantizes them wrongly on CPUs with AVX-512.
OUT, IN = 24, 92


def textbook(out: int, in_: int, block_size: int, seed: int = 0):
    """Return tensors of random codes and scales, and the weight by one loop over its elements."""
    source = torch.Generator().manual_seed(seed)
    size = out * in_
    codes = torch.randint(0, 16, (size,), generator=source).tolist()
    scales = torch.rand(-(-size // block_size), generator=source)
    packed = [high << 4 | low for high, low in zip(codes[::2], [*codes[1::2], 0], strict=False)]
    table = torch.tensor(NF4)
    weight = torch.stack([table[code] * scales[i // block_size] for i, code in enumerate(codes)])
    state = {"quant_type": "nf4", "blocksize": block_size, "dtype": "float32", "shape": [out, in_]}
    tensors = {
        "weight": torch.tensor(packed, dtype=torch.uint8).unsqueeze(1),
        "weight.absmax": scales,
        "weight.quant_map": table,
        f"{bnb.STATE}nf4": as_bytes(state),
    }
    return tensors, weight.view(out, in_)


def as_bytes(state: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def library(dtype: torch.dtype = torch.bfloat16, table: str = "nf4", **options):
    """Return the tensors that bitsandbytes saves of a random weight, and what it dequantizes."""
    source = torch.Generator().manual_seed(1)
    weight = torch.randn(OUT, IN, generator=source) * torch.rand(OUT, 1, generator=source)
    packed, state = functional.quantize_4bit(weight.to(dtype), quant_type=table, **options)
    parts = {f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}
    return {"weight": packed, **parts}, functional.dequantize_4bit(packed, state)


def read(tensors: dict[str, torch.Tensor], out: int = OUT, in_: int = IN):
    return bnb.read_four_bit(tensors, in_features=in_, out_features=out, name="m.up_proj")


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 6), st.integers(1, 20), st.sampled_from([2, 32, 64]), st.integers(0, 99))
def test_nf4_by_the_book(out: int, in_: int, block_size: int, seed: int) -> None:
    tensors, weight = textbook(out, in_, block_size, seed)
    assert torch.equal(read(tensors, out, in_).dequantize(), weight)


@pytest.mark.parametrize("table", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block_size", [32, 64, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_four_bits_as_the_library(table, nested, block_size, dtype) -> None:
    tensors, expected = library(dtype, table, compress_statistics=nested, blocksize=block_size)
    weight = read(tensors)
    assert (weight.label, weight.shape) == (table, (OUT, IN))
    assert torch.equal(weight.dequantize(dtype), expected)


def test_other_storage_of_the_same_bytes() -> None:
    """`bnb_4bit_quant_storage`, which lets FSDP shard the codes."""
    tensors, expected = library(quant_storage=torch.bfloat16)
    assert tensors["weight"].dtype == torch.bfloat16
    assert torch.equal(read(tensors).dequantize(torch.bfloat16), expected)


def test_large_weights_are_dequantized_in_pieces(monkeypatch) -> None:
    tensors, expected = textbook(24, 92, 64)
    monkeypatch.setattr("qinfer.formats.codebook._PIECE", 200)
    assert torch.equal(read(tensors).dequantize(), expected)


def nested_without(key: str) -> dict[str, torch.Tensor]:
    tensors, _ = library(compress_statistics=True)
    del tensors[key]
    return tensors


def changed(key: str, value: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    return library(**options)[0] | {key: value}


def state_with(**changes) -> dict[str, torch.Tensor]:
    tensors, _ = library(compress_statistics=True)
    key = f"{bnb.STATE}nf4"
    state = json.loads(bytes(tensors[key].tolist())) | changes
    return tensors | {key: as_bytes({k: v for k, v in state.items() if v is not None})}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (nested_without("weight"), r"m\.up_proj\.weight is missing"),
        (nested_without("weight.absmax"), r"weight\.absmax is missing"),
        (nested_without("weight.quant_map"), r"weight\.quant_map is missing"),
        (nested_without("weight.nested_absmax"), r"weight\.nested_absmax is missing"),
        (nested_without("weight.nested_quant_map"), r"weight\.nested_quant_map is missing"),
        (nested_without(f"{bnb.STATE}nf4"), "has 0 of the tensors"),
        (changed(f"{bnb.STATE}fp4", torch.zeros(2, dtype=torch.uint8)), "has 2 of the tensors"),
        (changed(f"{bnb.STATE}nf4", torch.tensor([255, 1], dtype=torch.uint8)), "nf4 is no JSON"),
        (changed(f"{bnb.STATE}nf4", as_bytes([1])), r"nf4 holds \[1\]"),
        (changed("weight", torch.zeros(8, 1, dtype=torch.uint8)), "holds 8 bytes, expected 1104"),
        (changed("weight.absmax", torch.zeros(3)), "absmax has 3 elements, expected 35"),
        (changed("weight.absmax", torch.full((35,), torch.nan)), "absmax holds NaN"),
        (changed("weight.absmax", torch.zeros(35, dtype=torch.uint8)), "scales are plain"),
        (changed("weight.absmax", torch.zeros(35), compress_statistics=True), "are quantized"),
        (changed("weight.quant_map", torch.zeros(15)), "quant_map has 15 elements, expected 16"),
        (changed("weight.quant_map", torch.zeros(16).int()), "expected floating point"),
        (changed("weight.nested_absmax", torch.zeros(4), compress_statistics=True),
         "nested_absmax has 4 elements, expected 1"),
        (changed("weight.nested_quant_map", torch.zeros(16), compress_statistics=True),
         "nested_quant_map has 16 elements, expected 256"),
        (state_with(quant_type="fp4"), "expected quant_type 'nf4'"),
        (changed(f"{bnb.STATE}nf4", torch.full((99_999,), ord("["), dtype=torch.uint8)),
         "nf4 is no JSON"),
        (state_with(nested_offset=float("nan")), "nested_offset is nan"),
        (state_with(blocksize=0), "blocksize is 0"),
        (state_with(blocksize=7), "blocksize 7 is odd"),
        (state_with(blocksize=128), "absmax has 35 elements, expected 18"),
        (state_with(shape=[92, 24]), r"says shape \[92, 24\], expected \[24, 92\]"),
        (state_with(nested_offset=None), "nested_offset is None"),
        (state_with(nested_blocksize="x"), "nested_blocksize is 'x'"),
        (state_with(nested_blocksize=None), "scales are plain"),
    ],
)  # fmt: skip
def test_damage_is_told_by_name(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tensors)


# --- LLM.int8() -----------------------------------------------------------------------------------


def int8_tensors(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(2))
    codes, largest, _ = functional.int8_vectorwise_quant(weight.half())
    order = torch.tensor(0, dtype=torch.uint8)
    return {"weight": codes, "SCB": largest, "weight_format": order} | changes


def read_int8(tensors: dict[str, torch.Tensor]):
    return bnb.read_int8(tensors, in_features=IN, out_features=OUT, name="m.up_proj")


def test_int8_as_the_library() -> None:
    tensors = int8_tensors()
    expected = functional.int8_vectorwise_dequant(tensors["weight"], tensors["SCB"])
    weight = read_int8(tensors)
    assert weight.scheme == bnb.INT8_SCHEME
    assert weight.scales.dtype == torch.float32
    # The library multiplies by the reciprocal of 127; two roundings differ by an ulp or two.
    torch.testing.assert_close(weight.dequantize(), expected, rtol=3e-7, atol=0)
    del tensors["weight_format"]  # not in files of early versions
    assert torch.equal(read_int8(tensors).codes, weight.codes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_format": torch.tensor(2)}, "weight_format is 2: the weight is in tiles"),
        ({"weight": torch.zeros(OUT, IN, dtype=torch.uint8)}, "is torch.uint8 of shape"),
        ({"weight": torch.zeros(IN, OUT, dtype=torch.int8)}, r"of shape \(92, 24\), expected"),
        ({"SCB": torch.zeros(OUT - 1)}, "SCB has 23 elements, expected 24"),
        ({"SCB": torch.full((OUT,), torch.inf)}, "SCB holds NaN or infinity"),
    ],
)
def test_int8_damage_is_told_by_name(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_int8(int8_tensors(**changes))
    without = int8_tensors()
    del without["SCB"]
    with pytest.raises(CheckpointError, match=r"m\.up_proj\.SCB is missing"):
        read_int8(without)


# --- settings -------------------------------------------------------------------------------------


def test_settings_of_both_widths() -> None:
    four = bnb.parse_config({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    assert (four.method, four.version) == ("bitsandbytes", "nf4")
    stored = four.module_format("model.layers.0.mlp.up_proj")
    assert stored is not None
    assert (stored.layout, stored.scheme, stored.name) == (bnb.FOUR_BIT_LAYOUT, None, "nf4")
    assert four.module_format("lm_head") is None
    eight = bnb.parse_config({"_load_in_8bit": True, "llm_int8_threshold": 6.0})
    assert eight.scheme_for("model.layers.0.mlp.up_proj") == bnb.INT8_SCHEME
    assert bnb.parse_config({"load_in_4bit": True}).version == "fp4"  # transformers' default


@pytest.mark.parametrize(
    ("skip", "module", "skipped"),
    [
        # As `should_convert_module` of transformers 5.
        (["lm_head"], "lm_head", True),
        (["down_proj"], "model.layers.0.mlp.down_proj", True),
        (["model.layers.1"], "model.layers.1.mlp.up_proj", True),
        (["model.layers.1"], "model.layers.11.mlp.up_proj", False),
        (["model.layers.*"], "model.layers.11.mlp.up_proj", True),
        (["up"], "model.layers.1.mlp.up_proj", False),
        ([], "lm_head", False),
    ],
)
def test_skipped_modules(skip: list[str], module: str, skipped: bool) -> None:
    found = bnb.parse_config({"load_in_8bit": True, "llm_int8_skip_modules": skip})
    assert (found.module_format(module) is None) == skipped


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "load_in_4bit False and load_in_8bit False"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "one of them must be true"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "af4"}, "is 'af4'"),
        ({"load_in_8bit": True, "llm_int8_skip_modules": "lm_head"}, "must be a list"),
        ({"load_in_8bit": True, "llm_int8_skip_modules": ["("]}, "no regular expression"),
    ],
)
def test_settings_that_cannot_be(raw: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        bnb.parse_config(raw)
