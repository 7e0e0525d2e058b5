"""The unquantized model as a GGUF file, for llama.cpp's quantizer."""

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

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
