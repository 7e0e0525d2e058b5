"""Rounding through bitsandbytes: what is written is what transformers' loader makes itself."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from safetensors.torch import load_file
from support.bnb_files import quantize_directory
from support.checkpoints import write_tiny
from transformers import BitsAndBytesConfig

from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import ConfigError, NonFiniteError, UnsupportedModelError
from qinfer.quant.bnb import ALGORITHMS, BnbRounding, settings
from qinfer.quant.pipeline import quantize

IN = 128  # whole blocks: of others, bitsandbytes 0.50 makes wrong values on CPUs with AVX-512


def random_weight(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(24, IN, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block_size", [64, 128])
def test_nf4_is_the_library_s(dtype: torch.dtype, block_size: int) -> None:
    rounding, weight = BnbRounding("bnb-nf4", block_size=block_size), random_weight(dtype)
    tensors = rounding.quantize(weight, name="m")
    state = functional.QuantState.from_dict(
        {name.removeprefix("weight."): part for name, part in tensors.items() if name != "weight"},
        device=torch.device("cpu"),
    )
    assert (state.quant_type, state.blocksize, state.nested) == ("nf4", block_size, True)
    assert (state.dtype, state.shape) == (dtype, weight.shape)
    dense = rounding.dequantize(tensors, in_features=IN, out_features=24, name="m")
    assert torch.equal(functional.dequantize_4bit(tensors["weight"], state), dense.to(dtype))
    error = (dense - weight.float()).norm() / weight.float().norm()
    assert error < 0.11  # NF4 in blocks of 64 on normal weights: about 0.09


def test_int8_is_the_library_s() -> None:
    weight = random_weight()
    weight[3] = 0
    rounding = BnbRounding("bnb-int8")
    tensors = rounding.quantize(weight, name="m")
    codes, largest, _ = functional.int8_vectorwise_quant(weight.half())
    keep = torch.arange(24) != 3
    assert torch.equal(tensors["weight"][keep], codes[keep])
    assert torch.equal(tensors["SCB"], largest)
    assert int(tensors["weight_format"]) == 0
    dense = rounding.dequantize(tensors, in_features=IN, out_features=24, name="m")
    assert (dense[3] == 0).all()
    assert ((dense - weight.float()).abs() <= largest.unsqueeze(1) / 127 * 0.501).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_source_is_not_changed(algorithm: str) -> None:
    weight = random_weight()
    BnbRounding(algorithm).quantize(weight, name="m")
    assert torch.equal(weight, random_weight())


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (
            "bnb-nf4",
            BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
                llm_int8_skip_modules=["lm_head", "model.layers.0.mlp.up_proj"],
            ),
        ),
        (
            "bnb-int8",
            BitsAndBytesConfig(
                load_in_8bit=True, llm_int8_skip_modules=["lm_head", "model.layers.0.mlp.up_proj"]
            ),
        ),
    ],
)
def test_settings_are_those_of_transformers(algorithm: str, expected: BitsAndBytesConfig) -> None:
    written = settings(algorithm, "bfloat16", ["model.layers.0.mlp.up_proj"])
    assert written == expected.to_dict()
    assert BitsAndBytesConfig.from_dict(written).to_dict() == written


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="no blocks of 48; choose group_size from"):
        BnbRounding("bnb-nf4", block_size=48)
    weight = random_weight()
    weight[1, 2] = 70000  # finite in bfloat16, not in float16
    BnbRounding("bnb-nf4").quantize(weight, name="m")
    with pytest.raises(NonFiniteError, match=r"layers\.0\.up_proj\.weight holds"):
        BnbRounding("bnb-int8").quantize(weight, name="layers.0.up_proj")
    weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"m\.weight holds NaN"):
        BnbRounding("bnb-nf4").quantize(weight, name="m")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(ConfigError, match=r"pip install 'qinfer\[bnb\]'"):
        BnbRounding("bnb-nf4")


# --- whole checkpoints ----------------------------------------------------------------------------

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.mark.parametrize(
    ("algorithm", "options"), [("bnb-nf4", NF4), ("bnb-int8", {"load_in_8bit": True})]
)
def test_checkpoint_is_what_the_libraries_save(
    algorithm: str, options: dict[str, Any], tmp_path: Path
) -> None:
    source = write_tiny(tmp_path / "source", dtype=torch.bfloat16)
    report = quantize(source, tmp_path / "out", algorithm=algorithm, overrides=("0.mlp.*=skip",))
    expected = write_tiny(tmp_path / "expected", dtype=torch.bfloat16)
    skipped = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    quantize_directory(
        expected,
        llm_int8_skip_modules=["lm_head", *skipped],
        bnb_4bit_compute_dtype=torch.bfloat16 if algorithm == "bnb-nf4" else None,
        **options,
    )
    written, made = (load_file(path / "model.safetensors") for path in (tmp_path / "out", expected))
    assert written.keys() == made.keys()
    for name, tensor in written.items():
        assert tensor.dtype == made[name].dtype, name
        assert torch.equal(tensor, made[name]), name
    configs = [
        json.loads((path / "config.json").read_text()) for path in (tmp_path / "out", expected)
    ]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert configs[0]["qinfer_kv_cache"]["dtype"] == "int8"
    assert not (tmp_path / "out/quantize_config.json").exists()
    assert report.scheme == {"bnb-nf4": "nf4 g64", "bnb-int8": "int8 channel sym"}[algorithm]
    size = sum(tensor.nbytes for tensor in written.values())
    assert abs(report.sizes.output_bytes - size) < 12 * len(report.rows)  # digits of an offset
    quantized = [row for row in report.rows if row.scheme is not None]
    assert len(quantized) == 11
    low, high = {"bnb-nf4": (0.004, 0.015), "bnb-int8": (1e-6, 2e-4)}[algorithm]
    assert all(row.error is not None and low < row.error < high for row in quantized)
    open_checkpoint(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "bnb-nf4", "asym": True}, "decides width, symmetry and format itself"),
        ({"algorithm": "bnb-nf4", "format": "compressed-tensors"}, "decides width"),
        ({"algorithm": "bnb-int8", "weights": "int3"}, "decides width"),
        ({"algorithm": "bnb-nf4", "weights": "int8"}, "4 bits, not int8"),
        ({"algorithm": "bnb-nf4", "overrides": ("up_proj=bits:8",)}, "can only be REGEX=skip"),
        ({"algorithm": "bnb-int8", "group_size": 64}, "one scale per row, not groups of 64"),
        ({"algorithm": "bnb-nf4", "group_size": 48}, "no blocks of 48"),
    ],
)
def test_options_that_do_not_go_together(
    options: dict[str, Any], message: str, tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        quantize(tiny_llama, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_experts_are_refused(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "mixtral")
    with pytest.raises(UnsupportedModelError, match="loads no experts quantized by bitsandbytes"):
        quantize(source, tmp_path / "out", algorithm="bnb-nf4")
