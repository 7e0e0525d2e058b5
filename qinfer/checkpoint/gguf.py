"""Turns a GGUF file into a normal model directory: weights, config, tokenizer, template.

The file is read with the `gguf` library, one tensor at a time. Weights are dequantized to float32
and rounded to bfloat16, or those of the linears are kept as the blocks that they are (see
`qinfer.formats.gguf_blocks`). Parsing a large vocabulary takes seconds, so callers convert once and
keep the directory (see `qinfer.checkpoint.hub`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader, GGUFValueType, ReaderField, ReaderTensor, quants

from qinfer.checkpoint.gguf_config import (
    PERMUTED,
    ROPE_FACTORS,
    Metadata,
    hf_name,
    model_config,
)
from qinfer.checkpoint.gguf_tokenizer import read_tokenizer
from qinfer.checkpoint.writer import CheckpointWriter
from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.formats import gguf_blocks

CONVERTER_VERSION = 1  # part of the cache key: raise it when the output changes

_Array = npt.NDArray[Any]


def convert(
    gguf_path: Path,
    out: Path,
    *,
    keep_codes: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Convert a GGUF file into the directory `out`, which appears whole or not at all.

    Args:
        gguf_path: the file.
        out: the directory to make.
        keep_codes: keep quantized linears as blocks of codes, which only qinfer reads; else
            everything becomes bfloat16, which every program reads.
        on_progress: called with (tensors done, tensors in all).

    Raises:
        CheckpointError: the file is missing, truncated or damaged.
        UnsupportedModelError: architecture, tensor type or tokenizer is not supported.
        ConfigError: `out` exists already.
    """
    writer = CheckpointWriter(out)
    reader = _open(gguf_path)
    meta = Metadata(
        {key: _value(field) for key, field in reader.fields.items()}, source=str(gguf_path)
    )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = tensors.pop(ROPE_FACTORS, None)
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{gguf_path} has no tensor token_embd.weight")
    config = model_config(
        meta,
        frozenset(tensors),
        num_rows=int(tensors["token_embd.weight"].shape[-1]),
        rope_factors=None if factors is None else _dequantize(factors),
    )
    tokenizer = read_tokenizer(meta, config["max_position_embeddings"])
    rows = _RowOrder(meta, config)
    types: dict[str, str] = {}
    with writer:
        for done, (name, tensor) in enumerate(tensors.items(), start=1):
            target = hf_name(name)  # a name that is none of GGUF's ends here
            if keep_codes and _holds_codes(target, tensor):
                module = target.removesuffix(".weight")
                types[module] = tensor.tensor_type.name
                blocks = rows.restore(name, tensor.data)
                writer.add(f"{module}.{gguf_blocks.BLOCKS}", torch.from_numpy(np.array(blocks)))
            else:
                values = rows.restore(name, _dequantize(tensor))
                writer.add(target, torch.from_numpy(np.array(values)).to(torch.bfloat16))
            if on_progress:
                on_progress(done, len(tensors))
        if types:
            config["quantization_config"] = gguf_blocks.config(types)
        writer.write_json("config.json", config)
        writer.write_json("generation_config.json", tokenizer.generation)
        writer.write_json("tokenizer_config.json", tokenizer.config)
        tokenizer.tokenizer.save(str(writer.partial / "tokenizer.json"))


class _RowOrder:
    """Undoes what llama.cpp's converter did to the rows of q and k, in some architectures.

    Args:
        meta: the file's metadata.
        config: config.json.
    """

    def __init__(self, meta: Metadata, config: Mapping[str, Any]) -> None:
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        permuted = heads if meta.architecture() in PERMUTED else {}
        self._num_heads = {part: int(config[key]) for part, key in permuted.items()}

    def restore(self, name: str, values: _Array) -> _Array:
        """Return the rows of tensor `name` in transformers' order."""
        num_heads = self._num_heads.get(name.split(".")[-2])
        return values if num_heads is None else unpermute(values, num_heads)


def unpermute(values: _Array, num_heads: int) -> _Array:
    """Undo llama.cpp's reordering of the rows of q and k, be they numbers or blocks of codes.

    Within each head llama.cpp stores the two channels of a rotary pair side by side, where
    transformers has the first halves of all pairs before the second halves
    (`LlamaModel.permute` in convert_hf_to_gguf.py).
    """
    half = values.shape[0] // num_heads // 2
    paired = values.reshape(num_heads, half, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


def _open(path: Path) -> GGUFReader:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    try:
        return GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{path} is truncated or no GGUF file: {error}") from error


def _value(field: ReaderField) -> Any:
    """Return a metadata value; other arrays than lists of numbers and strings do not occur."""
    if not field.types or (field.types[0] == GGUFValueType.ARRAY and not field.data):
        return []
    return field.contents()


def _holds_codes(target: str, tensor: ReaderTensor) -> bool:
    """Tell whether a tensor is the quantized weight of a block's linear.

    Raises:
        UnsupportedModelError: nothing can tell the values of its type.
    """
    if not target.endswith("_proj.weight") or not gguf_blocks.is_block_type(
        tensor.tensor_type.name
    ):
        return False
    _dequantize(tensor, rows=1)
    return True


def _dequantize(tensor: ReaderTensor, *, rows: int | None = None) -> npt.NDArray[np.float32]:
    """Return a tensor, or its first rows, as float32 in row-major order: `[out, in]`."""
    try:
        values: npt.NDArray[np.float32] = quants.dequantize(tensor.data[:rows], tensor.tensor_type)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"tensor {tensor.name} has type {tensor.tensor_type.name}, which cannot be dequantized"
        ) from error
    return values
