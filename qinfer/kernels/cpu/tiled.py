"""Weights in tiles of 16 rows, as the C++ linear op reads them.

Owns the ctypes view of `csrc/linear.h`: the layout (`tiling` fills it), the op in a program, and
one call of it alone. Knows nothing of layers.
"""

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch

from qinfer.errors import ConfigError
from qinfer.kernels.cpu import native
from qinfer.kernels.cpu.program import (
    ACTIVATION_GROUP,
    TABLE_DTYPES,
    EmbedArgs,
    Int8Buffer,
    OpKind,
    Program,
    pointer,
)
from qinfer.kernels.spec import LinearSpec

TILE_ROWS = 16

Activations = Literal["int8", "bf16", "exact"]


class WeightKind(IntEnum):
    """`qinfer_weight_kind`: how the elements of a tile are stored."""

    W4 = 0
    W8 = 1
    BF16 = 2
    FP32 = 3


_HELD_KINDS = {4: WeightKind.W4, 8: WeightKind.W8}
CODE_KINDS = {bits: _HELD_KINDS[held] for bits, held in native.HELD_BITS.items()}
DENSE_KINDS = {torch.bfloat16: WeightKind.BF16, torch.float32: WeightKind.FP32}
SCALE_DTYPES = {torch.float32: 0, torch.float16: 2}  # `qinfer_dtype`
DENSE_DTYPES = {kind: dtype for dtype, kind in DENSE_KINDS.items()}
ELEMENT_BITS = {WeightKind.W4: 4, WeightKind.W8: 8, WeightKind.BF16: 16, WeightKind.FP32: 32}


class TiledWeightArgs(ctypes.Structure):
    """`qinfer_tiled_weight`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("scale_dtype", ctypes.c_int32),
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
class RoundedRows:
    """Activations that the op rounds to bfloat16, to multiply them with bfloat16 weights.

    Only where `OpKind.LINEAR_BF16.available`. Denormals count as zero.

    Args:
        rows: float32 `[max_tokens, in]`.
    """

    rows: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TiledWeight:
    """A weight in tiles; `csrc/linear.h` defines the layout.

    Args:
        data: uint8, aligned to 64 bytes: the tiles.
        scales: float16 `[tiles, groups, 16]`, or float32 where float16 cannot hold them; None where
            the weight is dense.
        zeros: int16 `[tiles, groups, 16]`, unsigned zero points; None = there are none.
        offsets: like the scales: the value of the smallest code; None = there are none.
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
    offsets: torch.Tensor | None
    permutation: torch.Tensor | None
    kind: WeightKind
    out_features: int
    in_features: int
    group_size: int

    @property
    def dtype(self) -> torch.dtype | None:
        """Type of the elements of a dense weight; None if it is quantized."""
        return DENSE_DTYPES.get(self.kind)

    @property
    def nbytes(self) -> int:
        """Bytes that the weight keeps resident."""
        parts = (self.data, self.scales, self.zeros, self.offsets, self.permutation)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def args(self) -> TiledWeightArgs:
        """The C view of the weight; valid while this object lives."""
        return TiledWeightArgs(
            data=self.data.data_ptr(),
            scales=None if self.scales is None else self.scales.data_ptr(),
            zeros=None if self.zeros is None else self.zeros.data_ptr(),
            offsets=None if self.offsets is None else self.offsets.data_ptr(),
            out_features=self.out_features,
            in_features=padded(self.in_features),
            group_size=self.group_size,
            kind=self.kind,
            scale_dtype=0 if self.scales is None else SCALE_DTYPES[self.scales.dtype],
        )


Activation = torch.Tensor | RoundedRows | Int8Buffer


def unsupported_reason(spec: LinearSpec) -> str | None:
    """Return why a layer cannot run on tiles, or None if it can.

    What only the weight itself tells (an irregular group index) is refused when it is repacked.
    """
    if spec.device != "cpu":
        return f"runs on the CPU, not on {spec.device}"
    missing = native.missing_reason()
    if missing is not None:
        return missing
    if spec.scheme is None:
        return None
    if spec.scheme.bits not in CODE_KINDS:
        return f"tiles hold codes of {native.widths(CODE_KINDS)} bits, not {spec.scheme.bits}"
    size = spec.scheme.group_size
    if size is not None and size % ACTIVATION_GROUP and size < spec.in_features:
        return f"groups must be multiples of {ACTIVATION_GROUP} columns, not {size}"
    return None


def linear_args(
    weight: TiledWeight,
    x: Activation,
    out: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> LinearArgs:
    """Return the struct of the op `out = x @ W.T + bias + residual`.

    Args:
        weight: the weight; must outlive the struct, as all tensors here.
        x: float32 `[max_tokens, in]`, in the order of the weight's columns, as it is or to be
            rounded; or quantized, in the order of the tiles (`TiledWeight.permutation`).
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
    _put_rows(args, weight, x, rows)
    return args


def _put_rows(args: LinearArgs, weight: TiledWeight, x: Activation, rows: int) -> None:
    """Write down where at least `rows` rows of activations are."""
    if isinstance(x, Int8Buffer):
        if weight.scales is None:
            raise ConfigError("a dense weight takes float activations, not int8")
        if x.shape[0] < rows or x.shape[1] != padded(weight.in_features):
            raise ConfigError(f"x is {x.shape}; it must be {(rows, padded(weight.in_features))}")
        args.int8_rows = x.pointer
        return
    if isinstance(x, RoundedRows):
        if weight.kind is not WeightKind.BF16:
            raise ConfigError(f"bfloat16 activations meet bfloat16 weights, not {weight.kind.name}")
        x = x.rows
    if _check_rows("x", x, weight.in_features) < rows:
        raise ConfigError(f"x has {x.shape[0]} rows, out has {rows}")
    args.float_rows = x.data_ptr()
    args.float_stride = x.stride(0)
    args.float_columns = weight.in_features
    if weight.permutation is not None:
        args.permutation = weight.permutation.data_ptr()


def add_linear(
    program: Program,
    weight: TiledWeight,
    x: Activation,
    out: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """Append the op to a program, which keeps all of this alive; arguments as `linear_args`."""
    args = linear_args(weight, x, out, num_tokens, bias=bias, residual=residual)
    kind = OpKind.LINEAR_BF16 if isinstance(x, RoundedRows) else OpKind.LINEAR
    program.add(kind, args, weight, x, out, num_tokens, bias, residual)


def add_embed(
    program: Program,
    table: TiledWeight,
    token_ids: torch.Tensor,
    out: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    """Append `out[t] = table[token_ids[t]]` for a dense table in tiles, as a tied head is.

    Args:
        program: gets the op, and keeps all of this alive.
        table: `[vocab, hidden]`.
        token_ids: int64 `[max_tokens]`; the caller checks that they are in the table.
        out: float32 `[max_tokens, hidden]`.
        num_tokens: int64 `[1]`, read when the program runs.

    Raises:
        ConfigError: something does not fit.
    """
    if table.dtype not in TABLE_DTYPES:
        raise ConfigError(f"an embedding is read from dense tiles, not from {table.kind.name}")
    rows = _check_rows("out", out, table.in_features)
    args = EmbedArgs(
        table=table.data.data_ptr(),
        token_ids=pointer("token_ids", token_ids, torch.int64, (rows,)),
        out=pointer("out", out, torch.float32, (rows, table.in_features)),
        hidden=table.in_features,
        dtype=TABLE_DTYPES[table.dtype],
        tiled=1,
        num_tokens=pointer("num_tokens", num_tokens, torch.int64, (1,)),
    )
    program.add(OpKind.EMBED, args, table, token_ids, out, num_tokens)


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
        activations: `int8` quantizes `x` first; `bf16` rounds it, see `RoundedRows`; `exact`
            multiplies in float32.
        bias: float32 `[out]`.
        residual: float32 `[tokens, out]`, contiguous.
        threads: size of the team.
    """
    tokens = x.shape[0]
    num_tokens = torch.tensor([tokens])
    out = torch.empty(tokens, weight.out_features)
    program = Program()
    rows: Activation = RoundedRows(x) if activations == "bf16" else x
    if activations == "int8":
        rows = Int8Buffer(tokens, weight.in_features)
        program.quantize(x, num_tokens, rows, permutation=weight.permutation)
    add_linear(program, weight, rows, out, num_tokens, bias=bias, residual=residual)
    program.run(threads)
    return out


def padded(columns: int) -> int:
    """Return the columns that tiles have for so many columns of a weight."""
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
