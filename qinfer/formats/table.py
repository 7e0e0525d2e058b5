"""The table of weight formats: adding one is a module with these functions and a row here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from qinfer.errors import CheckpointError
from qinfer.formats import gptq
from qinfer.formats.settings import QuantizationSettings
from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import WeightScheme

__all__ = ["FORMATS", "Format", "QuantizationSettings", "parse_settings"]


class FromTensors(Protocol):
    """Turns the tensors of one module into the canonical weight (see `gptq.from_tensors`)."""

    def __call__(
        self,
        tensors: Mapping[str, torch.Tensor],
        scheme: WeightScheme,
        *,
        in_features: int,
        out_features: int,
        version: str,
        name: str,
    ) -> QuantizedWeight:
        """Return the weight of module `name`."""


@dataclass(frozen=True, slots=True)
class Format:
    """A weight format on disk.

    Args:
        tensors: last parts of the names that a quantized module must have; the first of them
            tells that a module is quantized.
        optional_tensors: those that it may have.
        parse_config: reads the settings.
        from_tensors: reads a module.
    """

    tensors: tuple[str, ...]
    optional_tensors: tuple[str, ...]
    parse_config: Callable[[Mapping[str, Any]], QuantizationSettings]
    from_tensors: FromTensors


FORMATS: dict[str, Format] = {
    "gptq": Format(
        tensors=gptq.TENSORS,
        optional_tensors=gptq.OPTIONAL_TENSORS,
        parse_config=gptq.parse_config,
        from_tensors=gptq.from_tensors,
    ),
}


def parse_settings(raw: Mapping[str, Any]) -> QuantizationSettings:
    """Read a `quantization_config` of any format in the table.

    A missing `quant_method` means GPTQ: quantize_config.json of AutoGPTQ's time has none.

    Raises:
        CheckpointError: the method is not in the table, or its settings cannot be read.
    """
    method = str(raw.get("quant_method") or "gptq").lower()
    if method == "marlin":  # AutoGPTQ's name for a repacked GPTQ file; refused with its reason
        method = "gptq"
    if method not in FORMATS:
        raise CheckpointError(
            f"quantization method {method!r} is not supported; qinfer reads "
            f"{', '.join(FORMATS)} and unquantized checkpoints"
        )
    return FORMATS[method].parse_config(raw)
