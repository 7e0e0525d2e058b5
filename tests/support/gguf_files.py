"""Writes GGUF files from tiny Hugging Face checkpoints, as llama.cpp's converter would."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from safetensors.numpy import load_file

from qinfer.checkpoint.gguf_config import _LAYER_NAMES, _TOP_NAMES

# The bytes of a block that hold float16 numbers; all others may have any value.
SCALE_BYTES = {
    "Q4_0": slice(0, 2), "Q4_1": slice(0, 4), "Q5_0": slice(0, 2), "Q5_1": slice(0, 4),
    "Q8_0": slice(0, 2), "Q4_K": slice(0, 4), "Q5_K": slice(0, 4), "Q6_K": slice(208, 210),
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's reordering of q and k, as in `LlamaModel.permute` of convert_hf_to_gguf.py."""
    shape = weight.shape
    halves = weight.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:])
    return halves.swapaxes(1, 2).reshape(shape)


def byte_vocabulary() -> tuple[list[str], list[int]]:
    """Return tokens and types: bytes, the tiny checkpoints' special tokens, one merge, fillers."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [value for value in range(256) if value not in printable]
    alphabet = [chr(256 + others.index(v)) if v in others else chr(v) for v in range(256)]
    specials = ["<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    fillers = [f"[PAD{index}]" for index in range(262, 288)]
    return [*alphabet, *specials, "ab", *fillers], [1] * 256 + [3] * 5 + [1] + [5] * 26


def write_gguf(
    source: Path,
    out: Path,
    arch: str,
    *,
    pre: str | None = "smollm",
    extra: dict[str, Any] | None = None,
    factors: np.ndarray | None = None,
    quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    by_name: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write the checkpoint at `source` as a GGUF file of architecture `arch`.

    `extra` adds or replaces metadata; a value of None leaves the key out. `by_name` has the types
    of matrices whose name a regular expression finds, `quant` that of the others. Matrices of types
    that the library cannot quantize to get random values (see `random_blocks`).
    """
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(out, arch)
    rope = config.get("rope_parameters") or {}
    tokens, types = byte_vocabulary()
    metadata: dict[str, Any] = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.padding_token_id": 258,
        "tokenizer.chat_template": TEMPLATE,
    } | (extra or {})
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, tensor in load_file(source / "model.safetensors").items():
        if arch == "llama" and re.search(r"q_proj|k_proj", name):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            tensor = permute(tensor, config[heads])  # noqa: PLW2901 - one step of the loop
        found = (kind for pattern, kind in (by_name or {}).items() if re.search(pattern, name))
        kind = next(found, quant) if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        if kind.name.endswith("_K"):
            data = random_blocks(kind.name, *tensor.shape)
        else:
            data = gguf.quants.quantize(tensor.astype(np.float32), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Return blocks of random bits, uint8 `[rows, row bytes]`, with small float16 numbers."""
    source = np.random.default_rng(seed)
    block_size, block_bytes = GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert columns % block_size == 0
    shape = (rows, columns // block_size, block_bytes)
    raw = source.integers(0, 256, shape, dtype=np.uint8)
    place = SCALE_BYTES[kind]
    numbers = source.standard_normal((*shape[:2], (place.stop - place.start) // 2)) / 500
    raw[..., place] = numbers.astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def gguf_name(name: str) -> str:
    """Return the GGUF name of a Hugging Face tensor."""
    stem, _, suffix = name.rpartition(".")
    for short, full in _TOP_NAMES.items():
        if stem == full:
            return f"{short}.{suffix}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem)
    assert match, name
    short = {full: short for short, full in _LAYER_NAMES.items()}[match[2]]
    return f"blk.{match[1]}.{short}.{suffix}"


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
