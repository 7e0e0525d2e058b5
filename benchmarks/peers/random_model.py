"""A Llama of 1.1 B random weights, made from a seed: for speed, where no such model can be fetched.

Written tensor by tensor, so that memory stays small, in both forms that engines start from: a
checkpoint directory of transformers, and a GGUF file in bfloat16.
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from qinfer.checkpoint.writer import CheckpointWriter

STD = 0.02  # of every weight; residual branches are scaled down with depth, as in GPT-2
SHARD_BYTES = 512 << 20
SPECIAL = ("<s>", "</s>")
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama, under the names that transformers gives them."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int = 8192
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_attention_heads


LLAMA_1B = Shape(2048, 5632, 22, 32, 4, 32000)


def make(shape: Shape, folder: Path, gguf_file: Path, *, seed: int = 0) -> None:
    """Write the model in both forms, where they are not there yet.

    Args:
        shape: its sizes.
        folder: directory to make.
        gguf_file: file to make.
        seed: of the weights.
    """
    if not folder.exists():
        print(f"making {folder} ...", flush=True)
        _write_checkpoint(shape, folder, seed)
    if not gguf_file.exists():
        print(f"making {gguf_file} ...", flush=True)
        _write_gguf(shape, gguf_file, seed)


def _sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by its name, without `.weight`."""
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    kv = shape.num_key_value_heads * shape.head_dim
    block = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (shape.vocab_size, hidden)}
    for layer in range(shape.num_hidden_layers):
        sizes |= {f"model.layers.{layer}.{name}": size for name, size in block.items()}
    return sizes | {"model.norm": (hidden,), "lm_head": (shape.vocab_size, hidden)}


def _tensors(shape: Shape, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights in bfloat16; each from a seed of its own, so that both forms agree."""
    damping = (2 * shape.num_hidden_layers) ** -0.5
    for number, (name, size) in enumerate(_sizes(shape).items()):
        if len(size) == 1:
            yield name, torch.ones(size, dtype=torch.bfloat16)
            continue
        draw = torch.Generator().manual_seed(seed * 100_003 + number)
        std = STD * damping if name.endswith(("o_proj", "down_proj")) else STD
        yield name, torch.empty(size).normal_(0.0, std, generator=draw).bfloat16()


def _write_checkpoint(shape: Shape, folder: Path, seed: int) -> None:
    vocab, merges = _vocabulary(shape.vocab_size)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    with CheckpointWriter(folder, max_shard_bytes=SHARD_BYTES) as writer:
        for name, tensor in _tensors(shape, seed):
            writer.add(f"{name}.weight", tensor)
        writer.write_json("config.json", _config(shape))
        writer.write_json("generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
        names = {"tokenizer_class": "PreTrainedTokenizerFast"}
        names |= {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "pad_token": SPECIAL[1]}
        writer.write_json("tokenizer_config.json", names)
        tokenizer.save(str(writer.partial / "tokenizer.json"))


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }


def _vocabulary(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a byte-level BPE: special tokens, the bytes, then pairs of bytes until it is full."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    count = size - len(SPECIAL) - len(letters)
    pairs = [(first, second) for first in letters for second in letters][:count]
    words = [*SPECIAL, *letters, *(first + second for first, second in pairs)]
    return {word: number for number, word in enumerate(words)}, pairs


def _write_gguf(shape: Shape, target: Path, seed: int) -> None:
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    _add_gguf_facts(writer, shape)
    for name, size in _sizes(shape).items():
        if len(size) == 1:
            writer.add_tensor_info(_gguf_name(name), size, np.dtype(np.float32), 4 * size[0])
            continue
        size_in_bytes = (size[0], 2 * size[1])
        writer.add_tensor_info(
            _gguf_name(name),
            size_in_bytes,
            np.dtype(np.uint8),
            size_in_bytes[0] * size_in_bytes[1],
            raw_dtype=gguf.GGMLQuantizationType.BF16,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    heads = {"q_proj": shape.num_attention_heads, "k_proj": shape.num_key_value_heads}
    for name, tensor in _tensors(shape, seed):
        part = name.rpartition(".")[2]
        values = _paired(tensor, heads[part]) if part in heads else tensor
        raw = values.float() if values.ndim == 1 else values.view(torch.uint8)
        writer.write_tensor_data(raw.numpy())
    writer.close()
    shutil.move(partial, target)


def _add_gguf_facts(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name("random weights, for speed only")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    vocab, merges = _vocabulary(shape.vocab_size)
    types = [gguf.TokenType.CONTROL] * len(SPECIAL)
    types += [gguf.TokenType.NORMAL] * (len(vocab) - len(SPECIAL))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(vocab))
    writer.add_token_types(types)
    writer.add_token_merges([f"{first} {second}" for first, second in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, part = name.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.weight"
    return f"{GGUF_NAMES[name]}.weight"


def _paired(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Put the two channels of each rotary pair side by side, as llama.cpp has them."""
    rows, columns = weight.shape
    halves = weight.view(num_heads, 2, rows // num_heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns).contiguous()
