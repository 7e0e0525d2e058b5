"""bitsandbytes' tensors, 4-bit tables and LLM.int8(), as weights.

Layout (bitsandbytes 0.45 to 0.50, `QuantState.as_dict` and `Linear8bitLt`), beside the module's
`weight`: with 4 bits `weight.absmax`, `weight.quant_map`, `weight.quant_state.bitsandbytes__nf4`
(or `__fp4`: JSON as bytes) and, where the scales are quantized again (QLoRA, arXiv 2305.14314),
`weight.nested_absmax` and `weight.nested_quant_map`; with 8 bits (arXiv 2208.07339) `SCB`, the
largest magnitude of every row, and `weight_format`.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from qinfer.errors import CheckpointError
from qinfer.formats.checks import require
from qinfer.formats.codebook import CodebookWeight
from qinfer.formats.settings import ModuleFormat, QuantizationSettings, Rule
from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import WeightScheme

STATE = "weight.quant_state.bitsandbytes__"
TABLES = ("nf4", "fp4")
FOUR_BIT_TENSORS = ("weight", "weight.absmax", "weight.quant_map")
FOUR_BIT_MARKS = ("weight.absmax", "weight.quant_map")
FOUR_BIT_OPTIONAL = (
    *(f"{STATE}{table}" for table in TABLES),
    "weight.nested_absmax",
    "weight.nested_quant_map",
)
INT8_TENSORS = ("weight", "SCB")
INT8_MARKS = ("SCB",)
INT8_OPTIONAL = ("weight_format",)
INT8_SCHEME = WeightScheme(8, None)
FOUR_BIT_LAYOUT, INT8_LAYOUT = "bnb-4bit", "bnb-int8"
_ROW_MAJOR = 0  # `weight_format`; the others are tiles for old GPU kernels


def parse_config(raw: Mapping[str, Any]) -> QuantizationSettings:
    """Read transformers' `BitsAndBytesConfig`, of version 4 or 5.

    Which modules are quantized shows in their tensors: the list of skipped ones is a hint that is
    often incomplete.

    Raises:
        CheckpointError: it asks for neither or both of 4 and 8 bits, or for an unknown table.
    """
    four, eight = (
        raw.get(f"load_in_{bits}bit", raw.get(f"_load_in_{bits}bit")) is True for bits in (4, 8)
    )
    if four == eight:
        raise CheckpointError(
            f"quantization_config says load_in_4bit {four} and load_in_8bit {eight}; one of them "
            "must be true"
        )
    table = raw.get("bnb_4bit_quant_type", "fp4")
    if four and table not in TABLES:
        raise CheckpointError(
            f"quantization_config.bnb_4bit_quant_type is {table!r}; qinfer reads {TABLES}"
        )
    stored = (
        ModuleFormat(FOUR_BIT_LAYOUT, None, name=str(table))
        if four
        else ModuleFormat(INT8_LAYOUT, INT8_SCHEME)
    )
    return QuantizationSettings(
        method="bitsandbytes",
        version=str(table) if four else "int8",
        default=stored,
        rules=_skipped(raw.get("llm_int8_skip_modules")),
        raw=dict(raw),
    )


def _skipped(names: object) -> tuple[Rule, ...]:
    """Return rules for the skipped modules: regular expressions, or ends of names, as they are."""
    if names is None:
        return (("lm_head$", None),)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"quantization_config.llm_int8_skip_modules is {names!r}; it must be a list of names"
        )
    rules: list[Rule] = []
    for name in names:
        pattern = rf"(?:{name})(?:(?<=\.)|(?=\.|$))|.*{re.escape(name)}$"
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(
                f"quantization_config.llm_int8_skip_modules: {name!r} is no regular expression: "
                f"{error}"
            ) from error
        rules.append((pattern, None))
    return tuple(rules)


def from_tensors(
    tensors: Mapping[str, torch.Tensor],
    stored: ModuleFormat,
    *,
    in_features: int,
    out_features: int,
    name: str,
) -> CodebookWeight | QuantizedWeight:
    """Return the weight of module `name`; see `FromTensors` of the table."""
    read = read_int8 if stored.layout == INT8_LAYOUT else read_four_bit
    return read(tensors, in_features=in_features, out_features=out_features, name=name)


def read_four_bit(
    tensors: Mapping[str, torch.Tensor], *, in_features: int, out_features: int, name: str
) -> CodebookWeight:
    """Return the NF4 or FP4 weight that the tensors of one module hold.

    Args:
        tensors: by the names in `FOUR_BIT_TENSORS` and `FOUR_BIT_OPTIONAL`.
        in_features: columns of the weight, from the model's facts.
        out_features: rows of the weight, from the model's facts.
        name: the module's full name, for messages.

    Raises:
        CheckpointError: a tensor is missing, damaged or of another shape; it is named.
    """
    require(tensors, FOUR_BIT_TENSORS, name)
    table, state = _state(tensors, name)
    block_size = _positive(state, "blocksize", f"{name}.{STATE}{table}")
    if block_size % 2:
        raise CheckpointError(f"{name}.{STATE}{table}: blocksize {block_size} is odd")
    shape = state.get("shape")
    if shape != [out_features, in_features]:
        raise CheckpointError(
            f"{name}.{STATE}{table} says shape {shape}, expected "
            f"{[out_features, in_features]} from config.json"
        )
    size = out_features * in_features
    packed = tensors["weight"].contiguous().view(torch.uint8).flatten()  # whatever stores the bytes
    if packed.numel() != -(-size // 2):
        raise CheckpointError(
            f"{name}.weight holds {packed.numel()} bytes, expected {-(-size // 2)} for "
            f"{out_features} x {in_features} codes of 4 bits"
        )
    absmax = _absmax(tensors, state, f"{name}.{STATE}{table}", name)
    _check_length(absmax, -(-size // block_size), f"{name}.weight.absmax")
    return CodebookWeight(
        packed=packed,
        codebook=_floats(tensors, "weight.quant_map", 16, name),
        absmax=absmax,
        block_size=block_size,
        shape=(out_features, in_features),
        label=table,
    )


def read_int8(
    tensors: Mapping[str, torch.Tensor], *, in_features: int, out_features: int, name: str
) -> QuantizedWeight:
    """Return the LLM.int8() weight that the tensors of one module hold: INT8, one scale per row.

    Args:
        tensors: by the names in `INT8_TENSORS` and `INT8_OPTIONAL`.
        in_features: columns of the weight, from the model's facts.
        out_features: rows of the weight, from the model's facts.
        name: the module's full name, for messages.

    Raises:
        CheckpointError: a tensor is missing, damaged or of another shape; it is named.
    """
    require(tensors, INT8_TENSORS, name)
    layout = tensors.get("weight_format")
    if layout is not None and (layout.numel() != 1 or int(layout) != _ROW_MAJOR):
        raise CheckpointError(
            f"{name}.weight_format is {layout.tolist()}: the weight is in tiles for one GPU "
            "kernel; save it again with a current bitsandbytes, in row-major order (0)"
        )
    codes = tensors["weight"]
    if codes.dtype != torch.int8 or tuple(codes.shape) != (out_features, in_features):
        raise CheckpointError(
            f"{name}.weight is {codes.dtype} of shape {tuple(codes.shape)}, expected int8 of "
            f"shape {(out_features, in_features)} from config.json"
        )
    largest = _floats(tensors, "SCB", out_features, name)
    return QuantizedWeight(codes, (largest / 127).unsqueeze(1), INT8_SCHEME)


def _state(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[str, dict[str, Any]]:
    """Return the table's name and what the JSON in the state tensor says."""
    found = [table for table in TABLES if f"{STATE}{table}" in tensors]
    if len(found) != 1:
        raise CheckpointError(
            f"{name} has {len(found)} of the tensors {STATE}nf4 and {STATE}fp4, expected one"
        )
    key = f"{STATE}{found[0]}"
    try:
        state = json.loads(bytes(tensors[key].contiguous().view(torch.uint8).flatten().tolist()))
    except (ValueError, RecursionError) as error:  # neither UTF-8 nor JSON
        raise CheckpointError(f"{name}.{key} is no JSON; the file is damaged: {error}") from error
    if not isinstance(state, dict) or state.get("quant_type") != found[0]:
        raise CheckpointError(f"{name}.{key} holds {state!r}, expected quant_type {found[0]!r}")
    return found[0], state


def _absmax(
    tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], where: str, name: str
) -> torch.Tensor:
    """Return the scale of every block, float32, from its own codes where it is quantized too."""
    stored = tensors["weight.absmax"].flatten()
    nested = "nested_blocksize" in state
    if nested != (stored.dtype == torch.uint8):
        kind = "quantized" if nested else "plain"
        raise CheckpointError(
            f"{name}.weight.absmax is {stored.dtype}, although {where} says that scales are {kind}"
        )
    if not nested:
        return _floats(tensors, "weight.absmax", stored.numel(), name)
    require(tensors, ("weight.nested_absmax", "weight.nested_quant_map"), name)
    block_size = _positive(state, "nested_blocksize", where)
    offset = state.get("nested_offset")
    if not isinstance(offset, int | float) or not math.isfinite(offset):  # JSON may say NaN
        raise CheckpointError(f"{where}: nested_offset is {offset!r}; it must be a finite number")
    blocks = -(-stored.numel() // block_size)
    scales = _floats(tensors, "weight.nested_absmax", blocks, name)
    values = _floats(tensors, "weight.nested_quant_map", 256, name)[stored.int()]
    return values * scales.repeat_interleave(block_size)[: stored.numel()] + offset


def _positive(state: Mapping[str, Any], key: str, where: str) -> int:
    value = state.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{where}: {key} is {value!r}; it must be a positive integer")
    return value


def _floats(tensors: Mapping[str, torch.Tensor], key: str, length: int, name: str) -> torch.Tensor:
    """Return a tensor of finite numbers as float32 `[length]`."""
    values = tensors[key]
    if not values.dtype.is_floating_point:
        raise CheckpointError(f"{name}.{key} is {values.dtype}, expected floating point")
    _check_length(values, length, f"{name}.{key}")
    if not torch.isfinite(values).all():
        raise CheckpointError(f"{name}.{key} holds NaN or infinity; the file is damaged")
    return values.float().flatten()


def _check_length(values: torch.Tensor, length: int, where: str) -> None:
    if values.numel() != length:
        raise CheckpointError(f"{where} has {values.numel()} elements, expected {length}")
