"""GGUF metadata to config.json, and GGUF tensor names to those of the Hugging Face layout.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Only facts that a family's
decoder honours are carried over; anything else that would change the result is refused.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qinfer.errors import CheckpointError, UnsupportedModelError

# GGUF architecture -> (class, model_type) of transformers. Mistral's files say "llama".
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
# llama.cpp's converter reorders the rows of q and k for its pairing of rotary channels.
PERMUTED = frozenset({"llama"})

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
# Llama 3.1 and 3.2 differ in the first; the rest is common to all published models.
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


class Metadata:
    """Typed access to GGUF key-value pairs, with errors that name the key."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer; a missing key without a default is an error."""
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{self.source}: {key} is {value!r}; it must be an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a float; a missing key without a default is an error."""
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"{self.source}: {key} is {value!r}; it must be a number")
        return float(value)

    def optional(self, key: str) -> int | None:
        """Return an integer, or None if the key is missing."""
        return self.integer(key) if key in self.values else None

    def architecture(self) -> str:
        """Return the architecture.

        Raises:
            UnsupportedModelError: it is not among `ARCHITECTURES`.
        """
        name = self.values.get("general.architecture")
        if name not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{self.source}: architecture {name!r} is not supported; qinfer converts "
                f"{', '.join(ARCHITECTURES)}"
            )
        return str(name)


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor.

    Raises:
        UnsupportedModelError: the tensor belongs to no supported family.
    """
    stem, _, suffix = name.rpartition(".")
    top = _TOP_NAMES.get(stem)
    if top is not None:
        return f"{top}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    layer = _LAYER_NAMES.get(match[2]) if match else None
    if match is None or layer is None or suffix not in {"weight", "bias"}:
        raise UnsupportedModelError(f"tensor {name} belongs to no architecture that qinfer knows")
    return f"model.layers.{match[1]}.{layer}.{suffix}"


def model_config(
    meta: Metadata,
    tensors: frozenset[str],
    num_rows: int,
    rope_factors: npt.NDArray[np.float32] | None,
) -> dict[str, Any]:
    """Return config.json.

    Args:
        meta: the file's metadata.
        tensors: the GGUF names of its tensors.
        num_rows: rows of the embedding; the vocabulary may be listed shorter.
        rope_factors: the content of `rope_freqs.weight`, if the file has it.

    Raises:
        UnsupportedModelError: an architecture or a fact of one that is not supported.
    """
    arch = meta.architecture()
    hidden = meta.integer(f"{arch}.embedding_length")
    heads = meta.integer(f"{arch}.attention.head_count")
    head_dim = meta.integer(f"{arch}.attention.key_length", hidden // heads)
    _refuse_variants(meta, arch, head_dim)
    class_name, model_type = ARCHITECTURES[arch]
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": num_rows,
        "hidden_size": hidden,
        "intermediate_size": meta.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": meta.integer(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": meta.integer(f"{arch}.context_length"),
        "rms_norm_eps": _shortest(meta.number(f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": meta.number(f"{arch}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in tensors,
        "torch_dtype": "bfloat16",
    }
    scaling = _rope_scaling(meta, arch, head_dim, config["rope_theta"], rope_factors)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def _refuse_variants(meta: Metadata, arch: str, head_dim: int) -> None:
    """Refuse what would change the result and no supported family has."""
    if meta.integer(f"{arch}.expert_count", 0):
        raise UnsupportedModelError(f"{meta.source}: mixtures of experts are not supported")
    if meta.integer(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{meta.source}: keys and values of different size")
    if meta.integer(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(f"{meta.source}: rotation of a part of each head")
    if meta.integer(f"{arch}.attention.sliding_window", 0):
        raise UnsupportedModelError(f"{meta.source}: sliding window in a GGUF file")


def _shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(
    meta: Metadata,
    arch: str,
    head_dim: int,
    theta: float,
    factors: npt.NDArray[np.float32] | None,
) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3_scaling(meta.source, head_dim, theta, factors)
    kind = meta.values.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in {"linear", "yarn"}:
        raise UnsupportedModelError(f"{meta.source}: rope scaling {kind!r} is not supported")
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": meta.number(f"{arch}.rope.scaling.factor"),
    }
    original = meta.optional(f"{arch}.rope.scaling.original_context_length")
    if kind == "yarn" and original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(
    source: str, head_dim: int, theta: float, factors: npt.NDArray[np.float32]
) -> dict[str, Any]:
    """Recover Llama 3's settings from the per-channel factors that llama.cpp derived from them."""
    for factor in _LLAMA3_FACTORS:
        expected = llama3_factors(head_dim, theta, factor)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": _LLAMA3_ORIGINAL,
            }
    raise UnsupportedModelError(
        f"{source}: the rope factors of {ROPE_FACTORS} are those of no known Llama 3 model"
    )


def llama3_factors(head_dim: int, theta: float, factor: float) -> npt.NDArray[np.float32]:
    """Return by what Llama 3 divides the frequency of each rotary pair, `[head_dim / 2]`.

    Source: `convert_hf_to_gguf.py` of llama.cpp, `generate_extra_tensors` of its Llama model.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    wavelengths = 2 * math.pi / frequencies
    smooth = (_LLAMA3_ORIGINAL / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    blended = 1 / ((1 - smooth) / factor + smooth)
    longest, shortest = _LLAMA3_ORIGINAL / _LLAMA3_LOW, _LLAMA3_ORIGINAL / _LLAMA3_HIGH
    result = np.where(wavelengths < shortest, 1.0, np.where(wavelengths > longest, factor, blended))
    return result.astype(np.float32)
