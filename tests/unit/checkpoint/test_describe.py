from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import bnb_files
from support.checkpoints import write_tiny
from support.quantized import quantize_directory

from qinfer.checkpoint.describe import describe
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.schemes import WeightScheme


def test_m03_a_tied_head_counts_once(tmp_path: Path, tiny_llama: Path) -> None:
    """M03: parameters and bytes by part, at their real types."""
    untied = describe(open_checkpoint(tiny_llama))
    tied = describe(open_checkpoint(write_tiny(tmp_path / "tied", tie_word_embeddings=True)))
    assert untied.total.parameters - tied.total.parameters == 288 * 64
    assert [part.name for part in tied.parts] == ["embedding", "attention", "mlp", "norm"]
    assert tied.total.num_bytes == open_checkpoint(tmp_path / "tied").total_bytes
    assert tied.total.bits_per_weight == 32


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_count_as_the_weights_they_stand_for(tmp_path: Path, tiny_llama: Path, bits) -> None:
    path = write_tiny(tmp_path / "model")
    quantize_directory(path, WeightScheme(bits, 32))
    quantized, plain = describe(open_checkpoint(path)), describe(open_checkpoint(tiny_llama))
    assert [part.parameters for part in quantized.parts] == [
        part.parameters for part in plain.parts
    ]
    assert quantized.schemes == {f"int{bits} g32 sym": 14}
    assert quantized.dense_linears == 0
    assert plain.dense_linears == 14


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_codes_count_whatever_stores_their_bytes(tmp_path: Path, tiny_llama, storage) -> None:
    """bitsandbytes' `bnb_4bit_quant_storage`."""
    path = write_tiny(tmp_path / "model")
    bnb_files.quantize_directory(path, load_in_4bit=True, bnb_4bit_quant_type="nf4")
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = tensors[name].flatten().view(storage)
    save_file(tensors, path / "model.safetensors")
    found, plain = describe(open_checkpoint(path)), describe(open_checkpoint(tiny_llama))
    assert found.total.parameters == plain.total.parameters
    assert found.schemes == {"nf4": 14}


def test_every_family_has_no_other_parts(tmp_path: Path) -> None:
    for family in ("mistral", "qwen2", "qwen3"):
        parts = describe(open_checkpoint(write_tiny(tmp_path / family, family))).parts
        assert [p.name for p in parts] == ["embedding", "attention", "mlp", "norm", "head"]


@pytest.mark.parametrize(("family", "linears"), [("mixtral", 32), ("qwen3_moe", 29)])
@pytest.mark.parametrize("quantized", [False, True])
def test_experts_and_their_router_are_parts_of_their_own(
    tmp_path: Path, family: str, linears: int, *, quantized: bool
) -> None:
    path = write_tiny(tmp_path / family, family)
    if quantized:
        quantize_directory(path, WeightScheme(4, 32))
    found = describe(open_checkpoint(path))
    sizes = {part.name: part for part in found.parts}
    experts, inner = (2 * 4, 128) if family == "mixtral" else (6, 96)
    assert sizes["experts"].parameters == experts * 3 * 64 * inner
    assert sizes["router"].parameters == experts * 64
    assert ("mlp" in sizes) == (family == "qwen3_moe")
    assert "other" not in sizes
    assert found.dense_linears == (0 if quantized else linears)
    assert found.schemes == ({"int4 g32 sym": linears} if quantized else {})
    assert found.total.num_bytes == open_checkpoint(path).total_bytes
