"""The tensors of compressed-tensors' integer layouts to and from the canonical weight.

Layouts (compressed-tensors 0.20), for a weight `[out, in]`:

- `pack-quantized`: `weight_packed` int32 `[out, ceil(in * bits / 32)]`, a dense bit stream of the
  unsigned codes along the input; `weight_scale` `[out, groups]`; `weight_shape` int64 `[2]`;
  where zero points are stored, `weight_zero_point` int32 `[ceil(out * bits / 32), groups]`, packed
  along the output; with act-order by groups `weight_g_idx` int32 `[in]`.
- `int-quantized`: `weight` int8 `[out, in]`, `weight_scale` `[out, 1]` or `[1]`, and where zero
  points are stored `weight_zero_point` int8 of the same shape.

A packed weight is the transpose of GPTQ's: `weight_packed == qweight.T`, `weight_scale ==
scales.T`, `weight_zero_point == qzeros.T` of GPTQ v2. Pure functions of tensors.
"""

from collections.abc import Mapping

import torch

from qinfer.errors import CheckpointError, QuantizationError
from qinfer.formats.checks import (
    SCALE_DTYPES,
    check_dtype,
    check_range,
    check_scales,
    require,
)
from qinfer.formats.groups import group_index
from qinfer.formats.packing import num_words, pack, unpack
from qinfer.formats.settings import ModuleFormat
from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import WEIGHT_BITS, WeightScheme

PACKED, INT8 = "pack-quantized", "int-quantized"
PACKED_TENSORS = ("weight_packed", "weight_scale", "weight_shape")
PACKED_OPTIONAL = ("weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point")
INT8_TENSORS = ("weight", "weight_scale")
INT8_OPTIONAL = ("weight_zero_point", "input_scale", "input_zero_point")
_SPARSE_3_BIT = 10  # codes per word in files of before May 2026, whose words kept 2 bits empty


def misfit(in_features: int, scheme: WeightScheme) -> str | None:
    """Return why a layer of this width cannot be written in this scheme; None = it can.

    The last word of a row may be padded, so only groups restrict the shape.
    """
    group = scheme.group_size
    if group is not None and in_features % group:
        return (
            f"in_features {in_features} is not a multiple of group size {group} "
            f"({in_features / group:g} groups)"
        )
    return None


def to_packed(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of one layer as `pack-quantized`, scales in the type that they have.

    Raises:
        QuantizationError: the layout cannot carry the weight (see `refusal`).
    """
    problem = refusal(weight)
    if problem:
        raise QuantizationError(problem)
    bits = weight.scheme.bits
    middle = 1 << (bits - 1)
    tensors = {
        "weight_packed": pack(weight.codes.to(torch.int16) + middle, bits, 1),
        "weight_scale": weight.scales.contiguous(),
        "weight_shape": torch.tensor([weight.out_features, weight.in_features]),
    }
    if not weight.scheme.symmetric:
        zeros = weight.zeros
        if zeros is None:
            zeros = torch.zeros(weight.scales.shape, dtype=torch.int16)
        tensors["weight_zero_point"] = pack(zeros + middle, bits, 0)
    return tensors


def to_int8(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of one layer as `int-quantized`.

    Raises:
        QuantizationError: the weight is not INT8, symmetric and with one scale per row.
    """
    problem = refusal(weight) or int8_misfit(weight.scheme)
    if problem:
        raise QuantizationError(problem)
    return {"weight": weight.codes.contiguous(), "weight_scale": weight.scales.contiguous()}


def int8_misfit(scheme: WeightScheme) -> str | None:
    """Return why a scheme is none of W8A8 weights; None = it is."""
    if (scheme.bits, scheme.group_size, scheme.symmetric) != (8, None, True):
        return f"int-quantized weights are symmetric INT8 with one scale per row, not {scheme}"
    return None


def refusal(weight: QuantizedWeight) -> str | None:
    """Return why compressed-tensors cannot carry a weight; None = it can."""
    if weight.offsets is not None:
        return "its groups have real offsets (GGUF Q4_1, Q4_K), for which there is no tensor"
    if weight.group_index is not None:
        return (
            "its groups are scattered over the inputs (g_idx of act-order), which "
            "compressed-tensors no longer carries"
        )
    if weight.scales.dtype not in SCALE_DTYPES:
        return f"its scales are {weight.scales.dtype}"
    return misfit(weight.in_features, weight.scheme)


def from_packed(
    tensors: Mapping[str, torch.Tensor],
    stored: ModuleFormat,
    *,
    in_features: int,
    out_features: int,
    name: str,
) -> QuantizedWeight:
    """Return the weight that `pack-quantized` tensors hold (see `table.FromTensors`).

    Three bits come in two packings: dense since May 2026, ten codes to a word before. The width of
    `weight_packed` tells which.

    Raises:
        CheckpointError: a tensor is missing, has another shape or type than the settings imply, or
            holds values that cannot be.
    """
    scheme = stored.grid
    require(tensors, PACKED_TENSORS, name)
    found = tuple(tensors["weight_shape"].flatten().tolist())
    if found != (out_features, in_features):
        raise CheckpointError(
            f"{name}.weight_shape says {found}, expected {(out_features, in_features)} from "
            "config.json"
        )
    packed = tensors["weight_packed"]
    check_dtype(packed, torch.int32, f"{name}.weight_packed")
    middle = 1 << (scheme.bits - 1)
    unsigned = _unpack(packed, scheme, 1, (out_features, in_features), f"{name}.weight_packed")
    scales = _scales(tensors["weight_scale"], scheme, in_features, out_features, name)
    return QuantizedWeight(
        codes=unsigned.contiguous().sub_(middle).view(torch.int8),  # bytes wrap around
        scales=scales,
        scheme=scheme,
        zeros=_packed_zeros(tensors, scheme, tuple(scales.shape), name),
        group_index=_group_index(tensors.get("weight_g_idx"), scheme, in_features, name),
    )


def from_int8(
    tensors: Mapping[str, torch.Tensor],
    stored: ModuleFormat,
    *,
    in_features: int,
    out_features: int,
    name: str,
) -> QuantizedWeight:
    """Return the weight that `int-quantized` tensors hold (see `table.FromTensors`).

    Static scales of the inputs are not used: the kernels quantize activations in groups of 32 from
    their own largest values, which is finer.

    Raises:
        CheckpointError: a tensor is missing, or has another shape or type than the settings imply.
    """
    scheme = stored.grid
    require(tensors, INT8_TENSORS, name)
    codes = tensors["weight"]
    check_dtype(codes, torch.int8, f"{name}.weight")
    _check_shape(codes, (out_features, in_features), f"{name}.weight", "config.json")
    check_range(codes, scheme.bits, f"{name}.weight")
    scales = _scales(tensors["weight_scale"], scheme, in_features, out_features, name)
    zeros = tensors.get("weight_zero_point")
    if scheme.symmetric:
        _check_no_zeros(zeros, name)
        zeros = None
    else:
        zeros = _plain_zeros(zeros, scheme, tuple(scales.shape), name)
    return QuantizedWeight(codes, scales, scheme, zeros)


def _check_shape(tensor: torch.Tensor, expected: tuple[int, ...], name: str, source: str) -> None:
    found = tuple(tensor.shape)
    if found != expected:
        raise CheckpointError(f"{name} has shape {found}, expected {expected} from {source}")


def _unpack(
    words: torch.Tensor, scheme: WeightScheme, dim: int, shape: tuple[int, int], name: str
) -> torch.Tensor:
    """Return unsigned codes of `shape` from words packed along `dim`."""
    bits, size = scheme.bits, shape[dim]
    other = 1 - dim
    needed = num_words(size, bits)
    rows_fit = words.dim() == 2 and words.shape[other] == shape[other]
    if rows_fit and words.shape[dim] == needed:
        return unpack(words, bits, dim, size)
    if rows_fit and bits == 3 and words.shape[dim] == -(-size // _SPARSE_3_BIT):
        return _unpack_sparse(words, dim, size)
    expected = list(shape)
    expected[dim] = needed
    raise CheckpointError(
        f"{name} has shape {tuple(words.shape)}, expected {tuple(expected)}"
        + _likely_width(words, dim, shape, bits)
    )


def _unpack_sparse(words: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Unpack 3-bit codes that lie ten to a word."""
    shifts = torch.arange(_SPARSE_3_BIT, device=words.device) * 3
    lanes = (words.movedim(dim, -1).to(torch.int64)[..., None] >> shifts) & 7
    return lanes.flatten(-2)[..., :size].to(torch.uint8).movedim(-1, dim)


def _likely_width(words: torch.Tensor, dim: int, shape: tuple[int, int], bits: int) -> str:
    """Return a hint such as `; 4 bits would fit, the settings say num_bits = 8`, or nothing."""
    if words.dim() != 2 or words.shape[1 - dim] != shape[1 - dim]:
        return ""
    for other in WEIGHT_BITS:
        if other != bits and words.shape[dim] == num_words(shape[dim], other):
            return f"; {other} bits would fit, the settings say num_bits = {bits}"
    return ""


def _scales(
    stored: torch.Tensor, scheme: WeightScheme, in_features: int, out_features: int, name: str
) -> torch.Tensor:
    """Return the scales as `[out, groups]`; one for the whole tensor is repeated for every row."""
    check_scales(stored, f"{name}.weight_scale")
    groups = scheme.num_groups(in_features)
    if scheme.group_size is None and stored.numel() == 1:
        return stored.reshape(1, 1).repeat(out_features, 1)
    if scheme.group_size is None and tuple(stored.shape) == (out_features,):
        return stored[:, None].contiguous()
    if tuple(stored.shape) != (out_features, groups):
        raise CheckpointError(
            f"{name}.weight_scale has shape {tuple(stored.shape)}, expected "
            f"{(out_features, groups)}{_likely_group(stored, scheme, in_features)}"
        )
    return stored.contiguous()


def _likely_group(stored: torch.Tensor, scheme: WeightScheme, in_features: int) -> str:
    if stored.dim() != 2 or not stored.shape[1]:
        return ""
    likely = "channel" if stored.shape[1] == 1 else f"{-(-in_features // stored.shape[1])}"
    said = "channel" if scheme.group_size is None else f"{scheme.group_size}"
    return f"; group_size {likely} would fit, the settings say {said}"


def _packed_zeros(
    tensors: Mapping[str, torch.Tensor],
    scheme: WeightScheme,
    shape: tuple[int, ...],
    name: str,
) -> torch.Tensor | None:
    """Return the zero points as int16 `[out, groups]`; None for symmetric weights."""
    stored = tensors.get("weight_zero_point")
    if scheme.symmetric:
        if stored is not None and stored.dtype == torch.int32:
            raise CheckpointError(
                f"{name}.weight_zero_point exists although the settings say symmetric = true"
            )
        _check_no_zeros(stored, name)
        return None
    if stored is None or stored.dtype == torch.int8:
        return _plain_zeros(stored, scheme, shape, name)
    check_dtype(stored, torch.int32, f"{name}.weight_zero_point")
    unsigned = _unpack(stored, scheme, 0, (shape[0], shape[1]), f"{name}.weight_zero_point")
    return (unsigned.to(torch.int16) - (1 << (scheme.bits - 1))).contiguous()


def _plain_zeros(
    stored: torch.Tensor | None, scheme: WeightScheme, shape: tuple[int, ...], name: str
) -> torch.Tensor:
    """Return zero points that are stored one to a byte; one for all rows is repeated."""
    if stored is None:
        raise CheckpointError(
            f"{name}.weight_zero_point is missing although the settings say symmetric = false"
        )
    check_dtype(stored, torch.int8, f"{name}.weight_zero_point")
    check_range(stored, scheme.bits, f"{name}.weight_zero_point")
    zeros = stored.to(torch.int16)
    if shape[1] == 1 and zeros.numel() in {1, shape[0]}:
        return zeros.reshape(-1, 1).expand(shape).contiguous()
    _check_shape(zeros, shape, f"{name}.weight_zero_point", "the scales")
    return zeros.contiguous()


def _check_no_zeros(stored: torch.Tensor | None, name: str) -> None:
    if stored is not None and stored.any():
        raise CheckpointError(
            f"{name}.weight_zero_point holds other values than 0 although the settings say "
            "symmetric = true"
        )


def _group_index(
    stored: torch.Tensor | None, scheme: WeightScheme, in_features: int, name: str
) -> torch.Tensor | None:
    """Return the group of each input; entries of -1 throughout mean that none was set."""
    if stored is None or bool((stored == -1).all()):
        return None
    return group_index(stored, scheme, in_features, f"{name}.weight_g_idx")
