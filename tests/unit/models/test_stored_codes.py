"""Checkpoints of GGUF blocks and of bitsandbytes, run: against the same weights, dense."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, quants
from safetensors.torch import load_file, save_file
from support.bnb_files import quantize_directory
from support.checkpoints import load_oracle, write_tiny
from support.decoders import IDS, oracle
from support.gguf_files import write_gguf
from support.steps import layout_of, run_chunked

from qinfer.checkpoint.gguf import convert, unpermute
from qinfer.checkpoint.gguf_config import hf_name
from qinfer.checkpoint.hub import demo_model, resolve_model
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import CheckpointError
from qinfer.kvcache.pool import KVPool
from qinfer.models.causal_lm import CausalLM
from qinfer.models.config import ModelConfig
from qinfer.models.load import load_decoder, loaded_bytes
from qinfer.models.native import NativeDecoder
from qinfer.models.native_load import LoadOptions, load_model

TYPES = {
    "q_proj": Kind.Q4_K, "k_proj": Kind.Q8_0, "v_proj": Kind.Q5_K, "o_proj": Kind.Q6_K,
    "gate_proj": Kind.Q4_0, "up_proj": Kind.Q4_1, "down_proj": Kind.Q5_0,
}  # fmt: skip
FOUR_BIT = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_skip_modules": ["lm_head", "k_proj"],
}
EXACT = LoadOptions(dtype="float32", activations="exact", lm_head="model")


def logits_of(decoder: CausalLM) -> torch.Tensor:
    return run_chunked(decoder, IDS, [len(IDS)], KVPool(layout_of(decoder.config), 6), range(6))


def with_weights(path: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Replace linears of a checkpoint by float32 weights; returns the path."""
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"{name}.weight": weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def dequantized(file: Path, *, num_heads: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
    """Return the linears of a GGUF file as the library dequantizes them, float32, by name."""
    heads = {"q_proj": num_heads, "k_proj": num_kv_heads}
    weights = {}
    for tensor in GGUFReader(file).tensors:
        name = hf_name(tensor.name).removesuffix(".weight")
        part = name.rpartition(".")[2]
        if part in TYPES:
            values = quants.dequantize(tensor.data, tensor.tensor_type)
            values = unpermute(values, heads[part]) if part in heads else values
            weights[name] = torch.from_numpy(values)
    return weights


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A GGUF of many types as codes, and the logits of its dequantized weights."""
    folder = tmp_path_factory.mktemp("blocks")
    wide: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "head_dim": 64,
    }
    source = write_tiny(folder / "source", dtype=torch.bfloat16, **wide)
    plain = write_tiny(folder / "plain", **wide)
    file = write_gguf(plain, folder / "m.gguf", "llama", by_name=TYPES)
    convert(file, folder / "codes", keep_codes=True)
    weights = dequantized(file, num_heads=4, num_kv_heads=2)
    return folder / "codes", oracle(with_weights(source, weights), IDS)


def test_gguf_codes_run_as_their_dense_weights(blocks: tuple[Path, torch.Tensor]) -> None:
    path, expected = blocks
    decoder = load_model(open_checkpoint(path), EXACT)
    assert isinstance(decoder, NativeDecoder)
    assert (logits_of(decoder) - expected).abs().max() < 2e-4
    reference = load_decoder(open_checkpoint(path), dtype="float32")
    assert (logits_of(reference) - expected).abs().max() < 2e-4


@pytest.mark.slow
def test_demo_model_runs_on_its_codes(smollm2: Path) -> None:
    file = Path(demo_model())
    path = resolve_model(file, gguf_weights="codes")
    ids = list(range(100, 180))
    model: Any = load_oracle(smollm2).float()
    for name, weight in dequantized(file, num_heads=9, num_kv_heads=3).items():
        model.get_submodule(name).weight.data.copy_(weight)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    decoder = load_model(open_checkpoint(path), EXACT)
    pool = KVPool(layout_of(decoder.config), 5)
    assert (run_chunked(decoder, ids, [80], pool, range(5)) - expected).abs().max() < 2e-4
    rows = decoder.kernels(layout_of(decoder.config))
    assert sum("int4 g32 asym" in row.description for row in rows) == 30 * 4  # q, k, v are one


def test_int8_activations_come_close(blocks: tuple[Path, torch.Tensor]) -> None:
    path, expected = blocks
    rounded = logits_of(load_model(open_checkpoint(path), LoadOptions(dtype="float32")))
    assert (
        0 < (rounded - expected).norm() / expected.norm() < 0.05
    )  # random blocks, and the head in INT8


def test_types_without_a_kernel_are_told_once(
    blocks: tuple[Path, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = open_checkpoint(blocks[0])
    load_model(checkpoint, EXACT)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "1 of 8 linears" in told[0]
    assert "Q6_K (1)" in told[0]
    config = ModelConfig.from_dict(checkpoint.config)
    output = 256 * 256
    grown = loaded_bytes(checkpoint, config, "auto") - checkpoint.total_bytes
    assert grown == output * 2 - output * 210 // 256


@pytest.mark.parametrize("options", [FOUR_BIT, {"load_in_8bit": True}], ids=["nf4", "int8"])
def test_bitsandbytes_runs_as_its_dense_weights(
    options: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny(tmp_path / "source", "qwen2")
    dense = quantize_directory(path, **options)
    expected = oracle(with_weights(write_tiny(tmp_path / "dense", "qwen2"), dense), IDS)
    decoder = load_model(open_checkpoint(path), EXACT)
    assert isinstance(decoder, NativeDecoder)
    assert (logits_of(decoder) - expected).abs().max() < 1e-4
    reference = load_decoder(open_checkpoint(path), dtype="float32")
    assert (logits_of(reference) - expected).abs().max() < 1e-4
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    if "load_in_8bit" in options:
        assert told == []
        assert any(
            "int8 channel" in row.description for row in decoder.kernels(layout_of(decoder.config))
        )
    else:
        assert len(told) == 1
        assert "12 of 15 linears" in told[0]
        assert "nf4 (12)" in told[0]


def test_missing_parts_are_told_by_name(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "source")
    quantize_directory(path, **FOUR_BIT)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight.absmax"
    save_file({k: v for k, v in tensors.items() if k != name}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 of .* missing(.|\n)*up_proj\.weight\.absmax"):
        load_model(open_checkpoint(path), EXACT)
    name = "model.layers.1.mlp.up_proj.weight.nested_absmax"
    save_file({k: v for k, v in tensors.items() if k != name}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight\.nested_absmax is missing"):
        load_model(open_checkpoint(path), EXACT)
