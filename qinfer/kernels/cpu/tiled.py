"""Weights in tiles of 16 rows, as the C++ linear op reads them.

Owns the ctypes view of `csrc/linear.h`: repacking a weight, the op in a program, and one call of
it alone. Knows nothing of layers.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch

from qinfer.errors import ConfigError
from qinfer.formats.weight import QuantizedWeight
from qinfer.kernels.cpu import native
from qinfer.kernels.cpu.program import ACTIVATION_GROUP, Int8Buffer, OpKind, Program, pointer
from qinfer.kernels.spec import LinearSpec

TILE_ROWS = 16
_ALIGNMENT = 64

Activations = Literal["int8", "exact"]
# Returns zeroed bytes, uint8, aligned to 64.
Allocate = Callable[[int], torch.Tensor]


class WeightKind(IntEnum):
    """`qinfer_weight_kind`: how the elements of a tile are stored."""

    W4 = 0
    W8 = 1
    BF16 = 2
    FP32 = 3


_CODE_KINDS = {4: WeightKind.W4, 8: WeightKind.W8}
_DENSE_KINDS = {torch.bfloat16: WeightKind.BF16, torch.float32: WeightKind.FP32}
_ELEMENT_BITS = {WeightKind.W4: 4, WeightKind.W8: 8, WeightKind.BF16: 16, WeightKind.FP32: 32}


class TiledWeightArgs(ctypes.Structure):
    """`qinfer_tiled_weight`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class LinearArgs(ctypes.Structure):
    """`qinfer_linear`."""

    _fields_ = (
        ("weight", TiledWeightArgs),
        ("int8_rows", ctypes.c_void_p),
        ("float_rows", ctypes.c_void_p),
        ("float_stride", ctypes.c_int64),
        ("float_columns", ctypes.c_int64),
        ("permutation", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, eq=False)
class TiledWeight:
    """A weight in tiles; `csrc/linear.h` defines the layout.

    Args:
        data: uint8, aligned to 64 bytes: the tiles.
        scales: float16 `[tiles, groups, 16]`; None where the weight is dense.
        zeros: int16 `[tiles, groups, 16]`, unsigned zero points; None = symmetric or dense.
        permutation: int32 `[in]`: column k of the tiles is column `permutation[k]` of the weight;
            None = in order.
        kind: how the elements are stored.
        out_features: rows of the weight.
        in_features: columns of the weight, without padding.
        group_size: columns that share a scale, a multiple of 32.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    permutation: torch.Tensor | None
    kind: WeightKind
    out_features: int
    in_features: int
    group_size: int

    @property
    def nbytes(self) -> int:
        """Bytes that the weight keeps resident."""
        parts = (self.data, self.scales, self.zeros, self.permutation)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def args(self) -> TiledWeightArgs:
        """The C view of the weight; valid while this object lives."""
        return TiledWeightArgs(
            data=self.data.data_ptr(),
            scales=None if self.scales is None else self.scales.data_ptr(),
            zeros=None if self.zeros is None else self.zeros.data_ptr(),
            out_features=self.out_features,
            in_features=_padded(self.in_features),
            group_size=self.group_size,
            kind=self.kind,
        )


def unsupported_reason(spec: LinearSpec) -> str | None:
    """Return why a layer cannot run on tiles, or None if it can.

    What only the weight itself tells (scales that are no float16, an irregular group index) is
    refused by `tile`.
    """
    if spec.device != "cpu":
        return f"runs on the CPU, not on {spec.device}"
    if native.load() is None:
        return "the C++ library is not installed"
    if spec.scheme is None:
        return None
    if spec.scheme.bits not in _CODE_KINDS:
        return f"tiles hold 4 and 8 bits, not {spec.scheme.bits}"
    size = spec.scheme.group_size
    if size is not None and size % ACTIVATION_GROUP and size < spec.in_features:
        return f"groups must be multiples of {ACTIVATION_GROUP} columns, not {size}"
    return None


def aligned_bytes(num_bytes: int) -> torch.Tensor:
    """Return `num_bytes` zeroed bytes, aligned to 64."""
    room = torch.zeros(num_bytes + _ALIGNMENT, dtype=torch.uint8)
    start = -room.data_ptr() % _ALIGNMENT
    return room[start : start + num_bytes]


def tile(
    weight: torch.Tensor | QuantizedWeight, *, allocate: Allocate = aligned_bytes
) -> TiledWeight:
    """Repack a weight into tiles.

    Args:
        weight: dense `[out, in]` (float16 becomes float32), or quantized to 4 or 8 bits.
        allocate: where the tiles, scales and zeros are put.

    Raises:
        ConfigError: the library is absent or the weight cannot be tiled; the message says why.
    """
    if isinstance(weight, QuantizedWeight):
        return _tile_codes(weight, allocate)
    if weight.dtype not in _DENSE_KINDS:
        weight = weight.float()
    kind = _DENSE_KINDS[weight.dtype]
    out_features, in_features = weight.shape
    data = allocate(_tile_bytes(kind, out_features, in_features))
    source = weight.contiguous()
    _call(
        "qinfer_tile_dense",
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_int64(out_features),
        ctypes.c_int64(in_features),
        ctypes.c_int32(kind),
        ctypes.c_void_p(data.data_ptr()),
    )
    size = _padded(in_features)
    return TiledWeight(data, None, None, None, kind, out_features, in_features, size)


def linear_args(
    weight: TiledWeight,
    x: torch.Tensor | Int8Buffer,
    out: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> LinearArgs:
    """Return the struct of the op `out = x @ W.T + bias + residual`.

    Args:
        weight: the weight; must outlive the struct, as all tensors here.
        x: float32 `[max_tokens, in]`, in the order of the weight's columns; or quantized, in the
            order of the tiles (`TiledWeight.permutation`).
        out: float32 `[max_tokens, out]`; rows may lie further apart.
        num_tokens: int64 `[1]`, read when the op runs.
        bias: float32 `[out]`.
        residual: float32 with the shape and strides of `out`; may be `out`.

    Raises:
        ConfigError: something does not fit.
    """
    rows = _check_rows("out", out, weight.out_features)
    args = LinearArgs(
        weight=weight.args,
        out=out.data_ptr(),
        out_stride=out.stride(0),
        num_tokens=pointer("num_tokens", num_tokens, torch.int64, (1,)),
    )
    if bias is not None:
        args.bias = pointer("bias", bias, torch.float32, (weight.out_features,))
    if residual is not None:
        _check_rows("residual", residual, weight.out_features)
        if residual.shape != out.shape or residual.stride() != out.stride():
            raise ConfigError("residual and out differ in shape or strides")
        args.residual = residual.data_ptr()
    if isinstance(x, Int8Buffer):
        if weight.scales is None:
            raise ConfigError("a dense weight takes float activations, not int8")
        if x.shape[0] < rows or x.shape[1] != _padded(weight.in_features):
            raise ConfigError(f"x is {x.shape}; it must be {(rows, _padded(weight.in_features))}")
        args.int8_rows = x.pointer
        return args
    if _check_rows("x", x, weight.in_features) < rows:
        raise ConfigError(f"x has {x.shape[0]} rows, out has {rows}")
    args.float_rows = x.data_ptr()
    args.float_stride = x.stride(0)
    args.float_columns = weight.in_features
    if weight.permutation is not None:
        args.permutation = weight.permutation.data_ptr()
    return args


def add_linear(
    program: Program,
    weight: TiledWeight,
    x: torch.Tensor | Int8Buffer,
    out: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """Append the op to a program, which keeps all of this alive; arguments as `linear_args`."""
    args = linear_args(weight, x, out, num_tokens, bias=bias, residual=residual)
    program.add(OpKind.LINEAR, args, weight, x, out, num_tokens, bias, residual)


def run_linear(
    weight: TiledWeight,
    x: torch.Tensor,
    *,
    activations: Activations,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    threads: int = 1,
) -> torch.Tensor:
    """Return `x @ W.T + bias + residual` by a program of its own.

    Args:
        weight: the weight.
        x: float32 `[tokens, in]`, `tokens` > 0.
        activations: `int8` quantizes `x` first; `exact` multiplies in float32.
        bias: float32 `[out]`.
        residual: float32 `[tokens, out]`, contiguous.
        threads: size of the team.
    """
    tokens = x.shape[0]
    num_tokens = torch.tensor([tokens])
    out = torch.empty(tokens, weight.out_features)
    program = Program()
    rows: torch.Tensor | Int8Buffer = x
    if activations == "int8":
        rows = Int8Buffer(tokens, weight.in_features)
        program.quantize(x, num_tokens, rows, permutation=weight.permutation)
    add_linear(program, weight, rows, out, num_tokens, bias=bias, residual=residual)
    program.run(threads)
    return out


def _tile_codes(weight: QuantizedWeight, allocate: Allocate) -> TiledWeight:
    spec = LinearSpec(
        weight.in_features,
        weight.out_features,
        torch.float32,
        weight.codes.device.type,
        weight.scheme,
    )
    reason = unsupported_reason(spec)
    if reason is not None:
        raise ConfigError(reason)
    native.check_groups(weight)
    bits, kind = weight.scheme.bits, _CODE_KINDS[weight.scheme.bits]
    permutation = _permutation(weight)
    codes = weight.codes.to(torch.int8).contiguous()
    data = allocate(_tile_bytes(kind, weight.out_features, weight.in_features))
    _call(
        "qinfer_tile_codes",
        ctypes.c_void_p(codes.data_ptr()),
        ctypes.c_int64(weight.out_features),
        ctypes.c_int64(weight.in_features),
        ctypes.c_void_p(None if permutation is None else permutation.data_ptr()),
        ctypes.c_int32(bits),
        ctypes.c_void_p(data.data_ptr()),
    )
    zeros = weight.zeros
    if zeros is not None:
        zeros = _tile_groups((zeros + (1 << (bits - 1))).to(torch.int16), allocate)
    size = weight.scheme.group_size or weight.in_features
    return TiledWeight(
        data=data,
        scales=_tile_groups(_half_scales(weight.scales), allocate),
        zeros=zeros,
        permutation=permutation,
        kind=kind,
        out_features=weight.out_features,
        in_features=weight.in_features,
        group_size=min(_padded(size), _padded(weight.in_features)),
    )


def _half_scales(scales: torch.Tensor) -> torch.Tensor:
    half = scales.to(torch.float16)
    if not torch.equal(half.float(), scales.float()):
        raise ConfigError(f"tiles hold float16 scales; these {scales.dtype} scales are not exact")
    return half


def _permutation(weight: QuantizedWeight) -> torch.Tensor | None:
    """Return the columns sorted by group, or None if they are in order."""
    index = weight.group_index
    if index is None:
        return None
    order = index.argsort(stable=True)
    size = weight.scheme.group_size or weight.in_features
    if not torch.equal(index[order], torch.arange(weight.in_features, dtype=index.dtype) // size):
        raise ConfigError(f"the group index does not give every group {size} columns")
    in_order = torch.equal(order, torch.arange(weight.in_features))
    return None if in_order else order.to(torch.int32)


def _tile_groups(values: torch.Tensor, allocate: Allocate) -> torch.Tensor:
    """Return 16-bit `[out, groups]` as `[tiles, groups, 16]`, zeros after the last row."""
    rows, groups = values.shape
    tiles = -(-rows // TILE_ROWS)
    padded = torch.nn.functional.pad(values, (0, 0, 0, tiles * TILE_ROWS - rows))
    room = allocate(padded.nbytes).view(values.dtype).view(tiles, groups, TILE_ROWS)
    return room.copy_(padded.view(tiles, TILE_ROWS, groups).transpose(1, 2))


def _tile_bytes(kind: WeightKind, out_features: int, in_features: int) -> int:
    tiles = -(-out_features // TILE_ROWS)
    return tiles * TILE_ROWS * _padded(in_features) * _ELEMENT_BITS[kind] // 8


def _padded(columns: int) -> int:
    return -(-columns // ACTIVATION_GROUP) * ACTIVATION_GROUP


def _check_rows(name: str, x: torch.Tensor, columns: int) -> int:
    """Return the rows of float32 activations, whose rows may lie apart."""
    fits = x.dim() == 2 and x.dtype == torch.float32 and x.device.type == "cpu"
    if not fits or x.shape[1] != columns or x.stride(1) != 1 or x.stride(0) < columns:
        raise ConfigError(
            f"{name} is {tuple(x.shape)} {x.dtype} on {x.device}, strides {x.stride()}; the C++ "
            f"kernels need float32 [rows, {columns}] on cpu, each row contiguous"
        )
    return x.shape[0]


def _call(function: str, *args: object) -> None:
    library = native.load()
    if library is None:
        raise ConfigError("the C++ kernels are not available; see the log for the reason")
    status = library.handle[function](*args)
    if status != 0:
        raise ConfigError(f"{function} refused its arguments (status {status})")
