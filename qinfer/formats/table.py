"""The tables of weight layouts and of settings: a format is a module of functions and a row here.

Two things are looked up apart. `METHODS` has one parser per `quant_method`; it turns the settings
into rules that say for each module which layout and scheme it has (`ModuleFormat`). `FORMATS` has
one row per layout; it says which tensors such a module has and how they become a weight. So one
file can hold several layouts (compressed-tensors' mixed precision), and one layout can come from
several methods.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from qinfer.errors import CheckpointError
from qinfer.formats import awq, bnb, compressed, compressed_config, gguf_blocks, gptq
from qinfer.formats.codebook import CodebookWeight
from qinfer.formats.settings import ModuleFormat, QuantizationSettings
from qinfer.formats.weight import QuantizedWeight

__all__ = [
    "FORMATS",
    "METHODS",
    "Format",
    "ModuleFormat",
    "QuantizationSettings",
    "parse_settings",
    "split_name",
]


class FromTensors(Protocol):
    """Turns the tensors of one module into its weight."""

    def __call__(
        self,
        tensors: Mapping[str, torch.Tensor],
        stored: ModuleFormat,
        *,
        in_features: int,
        out_features: int,
        name: str,
    ) -> QuantizedWeight | CodebookWeight | torch.Tensor:
        """Return the weight of module `name`: float32 where it has to be dequantized to be read.

        Args:
            tensors: those of the module that exist, by their part of the name.
            stored: what the settings say about the module.
            in_features: columns of the weight, from the model's facts.
            out_features: rows of the weight, from the model's facts.
            name: the module's full name, for messages.

        Raises:
            CheckpointError: a tensor is missing, or contradicts the scheme or the shape.
        """


class CountCodes(Protocol):
    """Tells how many weights the first tensor of a layout stands for."""

    def __call__(self, num_bytes: int, stored: ModuleFormat) -> int:
        """Return the number of weights in `num_bytes` bytes of the tensor, whatever its type."""


@dataclass(frozen=True, slots=True)
class Format:
    """A layout of a quantized weight on disk. The tensors of module `m` are named `m.PART`.

    Args:
        tensors: parts that a quantized module must have; the first holds the codes.
        optional_tensors: parts that it may have.
        marks: parts that no unquantized module has; any of them tells that a module is quantized.
        from_tensors: reads a module.
        count_codes: weights by bytes of the first tensor.
    """

    tensors: tuple[str, ...]
    optional_tensors: tuple[str, ...]
    marks: tuple[str, ...]
    from_tensors: FromTensors
    count_codes: CountCodes


def _dense_bits(num_bytes: int, stored: ModuleFormat) -> int:
    """Count codes that lie bit to bit."""
    return num_bytes * 8 // stored.grid.bits


def _from_gptq(
    tensors: Mapping[str, torch.Tensor],
    stored: ModuleFormat,
    *,
    in_features: int,
    out_features: int,
    name: str,
) -> QuantizedWeight:
    return gptq.from_tensors(
        tensors,
        stored.grid,
        in_features=in_features,
        out_features=out_features,
        version=stored.variant,
        name=name,
    )


FORMATS: dict[str, Format] = {
    "gptq": Format(
        tensors=gptq.TENSORS,
        optional_tensors=gptq.OPTIONAL_TENSORS,
        marks=gptq.TENSORS,
        from_tensors=_from_gptq,
        count_codes=_dense_bits,
    ),
    bnb.FOUR_BIT_LAYOUT: Format(
        tensors=bnb.FOUR_BIT_TENSORS,
        optional_tensors=bnb.FOUR_BIT_OPTIONAL,
        marks=bnb.FOUR_BIT_MARKS,
        from_tensors=bnb.from_tensors,
        count_codes=lambda num_bytes, _: 2 * num_bytes,
    ),
    bnb.INT8_LAYOUT: Format(
        tensors=bnb.INT8_TENSORS,
        optional_tensors=bnb.INT8_OPTIONAL,
        marks=bnb.INT8_MARKS,
        from_tensors=bnb.from_tensors,
        count_codes=lambda num_bytes, _: num_bytes,
    ),
    gguf_blocks.LAYOUT: Format(
        tensors=(gguf_blocks.BLOCKS,),
        optional_tensors=(),
        marks=(gguf_blocks.BLOCKS,),
        from_tensors=gguf_blocks.from_tensors,
        count_codes=gguf_blocks.count_codes,
    ),
    compressed.PACKED: Format(
        tensors=compressed.PACKED_TENSORS,
        optional_tensors=compressed.PACKED_OPTIONAL,
        marks=("weight_packed", "weight_shape"),
        from_tensors=compressed.from_packed,
        count_codes=_dense_bits,
    ),
    compressed.INT8: Format(
        tensors=compressed.INT8_TENSORS,
        optional_tensors=compressed.INT8_OPTIONAL,
        marks=("weight_scale",),
        from_tensors=compressed.from_int8,
        count_codes=lambda num_bytes, _: num_bytes,
    ),
    "awq": Format(
        tensors=awq.TENSORS,
        optional_tensors=(),
        marks=awq.TENSORS,
        from_tensors=awq.from_tensors,
        count_codes=_dense_bits,
    ),
}

METHODS: dict[str, Callable[[Mapping[str, Any]], QuantizationSettings]] = {
    "gptq": gptq.parse_config,
    "bitsandbytes": bnb.parse_config,
    gguf_blocks.METHOD: gguf_blocks.parse_config,
    "marlin": gptq.parse_config,  # AutoGPTQ's name for a repacked file; refused with its reason
    compressed_config.METHOD: compressed_config.parse_config,
    "awq": awq.parse_config,
}


def parse_settings(raw: Mapping[str, Any]) -> QuantizationSettings:
    """Read a `quantization_config` of any method in the table.

    A missing `quant_method` means GPTQ, as in quantize_config.json of AutoGPTQ's time, unless there
    is a `zero_point`, as in AutoAWQ's quant_config.json.

    Raises:
        CheckpointError: the method is not in the table, or its settings cannot be read.
    """
    method = str(raw.get("quant_method") or ("awq" if "zero_point" in raw else "gptq")).lower()
    if method not in METHODS:
        known = ", ".join(name for name in METHODS if name != "marlin")
        raise CheckpointError(
            f"quantization method {method!r} is not supported; qinfer reads {known} and "
            "unquantized checkpoints"
        )
    return METHODS[method](raw)


def split_name(name: str) -> tuple[str, str]:
    """Split a tensor's name into its module and its part, which may hold dots itself."""
    parts = {part for fmt in FORMATS.values() for part in (*fmt.tensors, *fmt.optional_tensors)}
    for part in sorted(parts, key=len, reverse=True):
        if name.endswith(f".{part}"):
            return name.removesuffix(f".{part}"), part
    module, _, part = name.rpartition(".")
    return module, part
