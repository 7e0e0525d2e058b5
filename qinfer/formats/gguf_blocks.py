"""Blocks of quantized weights in GGUF files as the canonical weight, with exactly their values.

A row of a weight is a run of blocks of equal size. The types here are those whose values a kernel
can compute from integer codes, one scale and at most one offset per 32 inputs; five-bit codes are
held as eight bits. Layouts: `ggml-common.h` and `ggml-quants.c` of https://github.com/ggml-org/ggml.
All other types are dequantized by the `gguf` library.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES

from qinfer.errors import CheckpointError
from qinfer.formats.settings import ModuleFormat, QuantizationSettings, Rule
from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import WeightScheme

METHOD = LAYOUT = "gguf"
BLOCKS = "gguf_blocks"  # the tensor of a module: uint8 `[out, row bytes]`
_FORMAT_VERSION = 1
_GROUP = 32  # inputs that share a scale, in all of these types
_K_GROUPS = 8  # groups of a superblock of the K types
# Codes, scales and offsets of blocks `[out, blocks, bytes]`: codes unsigned `[out, in]`, the others
# `[out, groups]`; no offsets where the scheme is symmetric.
_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class _CodeType:
    """A type that becomes codes.

    Args:
        bits: width of a code in memory.
        split: takes blocks apart.
    """

    bits: int
    split: Callable[[torch.Tensor], _Parts]


def config(types: Mapping[str, str]) -> dict[str, Any]:
    """Return the `quantization_config` of a directory whose modules hold GGUF blocks.

    Args:
        types: GGUF's name of the type, by module.
    """
    return {"quant_method": METHOD, "format_version": _FORMAT_VERSION, "types": dict(types)}


def parse_config(raw: Mapping[str, Any]) -> QuantizationSettings:
    """Read what `config` wrote.

    Raises:
        CheckpointError: it is of a newer qinfer, or no block type is named for a module.
    """
    version, types = raw.get("format_version"), raw.get("types")
    if version != _FORMAT_VERSION:
        raise CheckpointError(
            f"quantization_config.format_version of GGUF blocks is {version!r}; this qinfer reads "
            f"{_FORMAT_VERSION}"
        )
    if not isinstance(types, Mapping):
        raise CheckpointError(f"quantization_config.types is {types!r}; it must be an object")
    modules: dict[str, list[str]] = {}
    for module, type_name in types.items():
        if not isinstance(type_name, str) or not is_block_type(type_name):
            raise CheckpointError(
                f"quantization_config.types: {module} has type {type_name!r}, which is no block "
                "type of GGUF"
            )
        modules.setdefault(type_name, []).append(re.escape(module))
    rules: list[Rule] = [
        (rf"(?:{'|'.join(names)})$", ModuleFormat(LAYOUT, scheme_of(kind), kind, name=kind))
        for kind, names in modules.items()
    ]
    return QuantizationSettings(
        method=METHOD, version=METHOD, default=None, rules=tuple(rules), raw=dict(raw)
    )


def scheme_of(type_name: str) -> WeightScheme | None:
    """Return the scheme of a type that is kept as codes; None = it has to be dequantized."""
    kind = _CODE_TYPES.get(type_name)
    if kind is None:
        return None
    return WeightScheme(kind.bits, _GROUP, symmetric=type_name in _SYMMETRIC)


def is_block_type(type_name: str) -> bool:
    """Tell whether a type stores blocks of codes, rather than plain numbers."""
    kind = GGMLQuantizationType.__members__.get(type_name)
    return kind is not None and GGML_QUANT_SIZES[kind][0] > 1


def row_bytes(type_name: str, in_features: int) -> int | None:
    """Return the bytes of a row; None if its inputs do not fill whole blocks."""
    block_size, block_bytes = _block_shape(type_name)
    return None if in_features % block_size else in_features // block_size * block_bytes


def count_codes(num_bytes: int, stored: ModuleFormat) -> int:
    """Return the weights that so many bytes of blocks hold."""
    block_size, block_bytes = _block_shape(stored.variant)
    return num_bytes // block_bytes * block_size


def from_tensors(
    tensors: Mapping[str, torch.Tensor],
    stored: ModuleFormat,
    *,
    in_features: int,
    out_features: int,
    name: str,
) -> QuantizedWeight | torch.Tensor:
    """Return the weight of module `name`: see `from_blocks`, and `FromTensors` of the table."""
    if BLOCKS not in tensors:
        raise CheckpointError(f"{name}.{BLOCKS} is missing")
    return from_blocks(
        tensors[BLOCKS],
        stored.variant,
        in_features=in_features,
        out_features=out_features,
        name=f"{name}.{BLOCKS}",
    )


def from_blocks(
    blocks: torch.Tensor, type_name: str, *, in_features: int, out_features: int, name: str
) -> QuantizedWeight | torch.Tensor:
    """Return the weight that GGUF blocks hold.

    Args:
        blocks: uint8 `[out, row bytes]`.
        type_name: GGUF's name of the type, such as `Q4_K`.
        in_features: columns of the weight, from the model's facts.
        out_features: rows of the weight, from the model's facts.
        name: the tensor's name, for messages.

    Returns:
        Codes where the type has a scheme (see `scheme_of`), else float32 `[out, in]`.

    Raises:
        CheckpointError: the shape is another, the type unknown, or a scale NaN or infinite.
    """
    if not is_block_type(type_name):
        raise CheckpointError(f"{name} has type {type_name!r}, which is no block type of GGUF")
    expected = (out_features, row_bytes(type_name, in_features))
    if tuple(blocks.shape) != expected or blocks.dtype != torch.uint8:
        raise CheckpointError(
            f"{name} is {blocks.dtype} of shape {tuple(blocks.shape)}; {type_name} of "
            f"{out_features} x {in_features} needs uint8 of shape {expected}"
        )
    scheme = scheme_of(type_name)
    if scheme is None:
        return _dequantized(blocks, type_name, name)
    parts = blocks.unflatten(1, (-1, _block_shape(type_name)[1]))  # [out, blocks, bytes]
    codes, scales, offsets = _CODE_TYPES[type_name].split(parts)
    for values in (scales, offsets):
        if values is not None and not torch.isfinite(values).all():
            raise CheckpointError(f"{name} holds a scale of NaN or infinity; the file is damaged")
    middle = 1 << (scheme.bits - 1)
    return QuantizedWeight(
        codes=codes.sub_(middle).view(torch.int8),  # bytes wrap around
        scales=scales.contiguous(),
        scheme=scheme,
        offsets=None if offsets is None else offsets.contiguous(),
    )


def _dequantized(blocks: torch.Tensor, type_name: str, name: str) -> torch.Tensor:
    try:
        with np.errstate(all="ignore"):  # damage shows in the values
            values = quants.dequantize(blocks.numpy(), GGMLQuantizationType[type_name])
    except NotImplementedError as error:
        raise CheckpointError(
            f"{name} has type {type_name}, which cannot be dequantized"
        ) from error
    weight = torch.from_numpy(values)
    if not torch.isfinite(weight).all():
        raise CheckpointError(f"{name} holds NaN or infinity; the file is damaged")
    return weight


def _block_shape(type_name: str) -> tuple[int, int]:
    """Return the inputs and the bytes of a block."""
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return int(size), int(num_bytes)


def _halves(parts: torch.Tensor, begin: int) -> torch.Tensor:
    """Return the float16 at byte `begin` of every block, `[out, blocks]`."""
    return parts[..., begin : begin + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return four-bit codes `[out, blocks, 2 * bytes]`: all low halves before all high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return 16 times bit `i` of four bytes for code `i`, `[out, blocks, 32]`."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts & 1) << 4).flatten(-2)


def _split_q4_0(parts: torch.Tensor) -> _Parts:
    """`d * (q - 8)`."""
    return _nibbles(parts[..., 2:]).flatten(1), _halves(parts, 0), None


def _split_q4_1(parts: torch.Tensor) -> _Parts:
    """`d * q + m`."""
    codes = _nibbles(parts[..., 4:]).flatten(1)
    return codes, _halves(parts, 0), _halves(parts, 2).float()


def _split_q5_0(parts: torch.Tensor) -> _Parts:
    """`d * (q - 16)`, with the fifth bits apart."""
    codes = _nibbles(parts[..., 6:]) | _fifth_bits(parts[..., 2:6])
    return (codes + (128 - 16)).flatten(1), _halves(parts, 0), None


def _split_q5_1(parts: torch.Tensor) -> _Parts:
    """`d * q + m`, with the fifth bits apart."""
    codes = _nibbles(parts[..., 8:]) | _fifth_bits(parts[..., 4:8])
    return codes.flatten(1), _halves(parts, 0), _halves(parts, 2).float()


def _split_q8_0(parts: torch.Tensor) -> _Parts:
    """`d * q` with signed q."""
    return (parts[..., 2:] + 128).flatten(1), _halves(parts, 0), None  # bytes wrap around


def _split_q4_k(parts: torch.Tensor) -> _Parts:
    """`d * scale * q - dmin * min` with 6-bit scale and min per group."""
    codes = _nibbles(parts[..., 16:].unflatten(-1, (4, 32)))  # two groups share 32 bytes
    return codes.flatten(1), *_k_scales(parts)


def _split_q5_k(parts: torch.Tensor) -> _Parts:
    """As Q4_K; bit `g` of byte `i` is the fifth bit of code `i` in group `g`."""
    codes = _nibbles(parts[..., 48:].unflatten(-1, (4, 32)))
    codes = codes.unflatten(-1, (2, 32)).flatten(-3, -2)  # [out, blocks, groups, 32]
    shifts = torch.arange(_K_GROUPS, dtype=torch.uint8).unsqueeze(1)
    codes |= (parts[..., 16:48].unsqueeze(-2) >> shifts & 1) << 4
    return codes.flatten(1), *_k_scales(parts)


def _k_scales(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and offset of every group, float32 `[out, groups]`.

    Twelve bytes hold eight pairs: four pairs have six bits in bytes 0-3 (scale) and 4-7 (min), the
    other four have their low bits in bytes 8-11 and their high bits atop the first eight bytes.
    """
    low, middle, high = parts[..., 4:16].split(4, dim=-1)
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=-1)
    minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=-1)
    factor, step = _halves(parts, 0).float(), _halves(parts, 2).float()
    offsets = -(step.unsqueeze(-1) * minima.float())
    return (factor.unsqueeze(-1) * scales.float()).flatten(1), offsets.flatten(1)


_CODE_TYPES = {
    "Q4_0": _CodeType(4, _split_q4_0),
    "Q4_1": _CodeType(4, _split_q4_1),
    "Q4_K": _CodeType(4, _split_q4_k),
    "Q5_0": _CodeType(8, _split_q5_0),
    "Q5_1": _CodeType(8, _split_q5_1),
    "Q5_K": _CodeType(8, _split_q5_k),
    "Q8_0": _CodeType(8, _split_q8_0),
}
_SYMMETRIC = {"Q4_0", "Q5_0", "Q8_0"}
