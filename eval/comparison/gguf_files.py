"""GGUF files for and from llama.cpp: the unquantized model as one, and Q4_0 as dense weights."""

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

from qinfer.checkpoint.gguf import unpermute
from qinfer.checkpoint.gguf_config import hf_name
from qinfer.checkpoint.reader import Checkpoint, open_checkpoint
from qinfer.checkpoint.writer import CheckpointWriter

OWN_FIELDS = ("GGUF.", "general.file_type", "general.quantization_version")


def write_bf16(gguf: Path, out: Path) -> None:
    """Write the model of a quantized GGUF file with its weights rounded to bfloat16.

    Those are the numbers of the directory that `qinfer convert` makes of it, which every other
    quantizer starts from. Vectors become float32, as llama.cpp has them.
    """
    reader = GGUFReader(gguf)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(out, architecture)
    for name, field in reader.fields.items():
        if name.startswith(OWN_FIELDS) or name == "general.architecture":
            continue
        element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
    for tensor in reader.tensors:
        values = torch.from_numpy(np.array(quants.dequantize(tensor.data, tensor.tensor_type)))
        rounded = values.bfloat16()
        if values.dim() == 1:
            writer.add_tensor(tensor.name, rounded.float().numpy())
            continue
        writer.add_tensor(
            tensor.name,
            rounded.view(torch.uint8).numpy(),
            raw_dtype=GGMLQuantizationType.BF16,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_dense(gguf: Path, source: Path, out: Path) -> dict[str, int]:
    """Write a model directory whose linears are those of a GGUF file, dequantized to float32.

    Embedding, head and norms are the source's own, so that the linears alone are compared.

    Args:
        gguf: what llama.cpp quantized.
        source: the model's directory.
        out: appears whole or not at all.

    Returns:
        How many linears have each of GGUF's types.
    """
    checkpoint = open_checkpoint(source)
    linears = {hf_name(item.name): item for item in GGUFReader(gguf).tensors if "blk" in item.name}
    heads = {
        "q_proj": checkpoint.config["num_attention_heads"],
        "k_proj": checkpoint.config["num_key_value_heads"],
    }
    types: dict[str, int] = {}
    with CheckpointWriter(out) as writer:
        for name in checkpoint.names():
            tensor = checkpoint.tensor(name)
            if name in linears and tensor.dim() == 2:
                item = linears[name]
                values = quants.dequantize(item.data, item.tensor_type)
                part = name.split(".")[-2]
                if part in heads:
                    values = unpermute(values, heads[part])
                tensor = torch.from_numpy(np.array(values, dtype=np.float32))
                types[item.tensor_type.name] = types.get(item.tensor_type.name, 0) + 1
            writer.add(name, tensor)
        _finish(writer, checkpoint, source)
    return types


def _finish(writer: CheckpointWriter, checkpoint: Checkpoint, source: Path) -> None:
    writer.write_json("config.json", checkpoint.config)
    writer.copy_companions(source)
