"""An independent GPTQ reader, written from the format's description alone, in numpy.

It imports nothing of qinfer and works code by code: slow, literal, and so a check of the product.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

Array = npt.NDArray[Any]


def field(words: Array, index: int, bits: int) -> int:
    """Return code `index` of a little-endian bit stream of 32-bit words."""
    value = 0
    for offset in range(bits):
        position = index * bits + offset
        word = int(words[position // 32]) & 0xFFFFFFFF
        value |= ((word >> (position % 32)) & 1) << offset
    return value


def unpack_rows(words: Array, bits: int, size: int) -> Array:
    """Unpack along dimension 0: `[words, n]` to `[size, n]`."""
    if bits in (2, 4, 8):
        per_word = 32 // bits
        unsigned = words.astype(np.int64) & 0xFFFFFFFF
        rows = [
            (unsigned[k // per_word] >> (bits * (k % per_word))) & ((1 << bits) - 1)
            for k in range(size)
        ]
        return np.stack(rows)
    return np.array(
        [[field(words[:, n], k, bits) for n in range(words.shape[1])] for k in range(size)]
    )


def dequantize_layer(tensors: dict[str, Array], config: dict[str, Any], bits: int) -> Array:
    """Return `W[n, k] = scales[g_idx[k], n] * (u[k, n] - zero[g_idx[k], n])` as float32."""
    scales = tensors["scales"].astype(np.float32)  # [G, N]
    groups, size_n = scales.shape
    size_k = tensors["qweight"].shape[0] * 32 // bits
    codes = unpack_rows(tensors["qweight"], bits, size_k)  # [K, N]
    zeros = unpack_rows(tensors["qzeros"].T, bits, size_n).T  # [G, N]
    if config.get("checkpoint_format", "gptq") == "gptq":
        zeros = zeros + 1
    g_idx = tensors.get("g_idx")
    if g_idx is None:
        group_size = config["group_size"] if config["group_size"] > 0 else size_k
        g_idx = np.arange(size_k) // group_size
    g_idx = np.where(g_idx < 0, g_idx + groups, g_idx)
    return (scales[g_idx] * (codes - zeros[g_idx]).astype(np.float32)).T


def dequantize_checkpoint(path: Path) -> dict[str, Array]:
    """Return the dense float32 weight of every quantized module of a checkpoint directory.

    The bits of a module follow from its own tensors, as `dynamic` may override the default:
    `qweight` has `K * bits / 32` rows and `g_idx` has K entries.
    """
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    side_file = json.loads((path / "quantize_config.json").read_text())
    assert side_file == config, "config.json and quantize_config.json differ"
    assert config["quant_method"] == "gptq"
    weights: dict[str, Array] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="np") as shard:
            names = list(shard.keys())
            for prefix in sorted(n.removesuffix(".qweight") for n in names if "qweight" in n):
                parts = ("qweight", "qzeros", "scales", "g_idx")
                tensors = {
                    part: shard.get_tensor(f"{prefix}.{part}")
                    for part in parts
                    if f"{prefix}.{part}" in names
                }
                bits = config["bits"]
                if "g_idx" in tensors:
                    bits = tensors["qweight"].shape[0] * 32 // tensors["g_idx"].shape[0]
                weights[prefix] = dequantize_layer(tensors, config, bits)
    return weights
