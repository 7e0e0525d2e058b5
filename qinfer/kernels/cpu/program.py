"""Programs of the C++ kernels: the ops of one step, recorded once and run by one native call.

Owns the ctypes view of `csrc/program.h` and `csrc/ops.h` and keeps alive what a program points at.
Sizes that change from step to step are read from int64 tensors of one element when the program
runs. Knows nothing of layers.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from qinfer.errors import ConfigError, QinferError
from qinfer.kernels.cpu import native

ACTIVATION_GROUP = 32
_ROW_BLOCK = 8
MAX_THREADS = 1024
TABLE_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_STATUS = {1: "an argument of an op is not valid", 2: "the system has no thread left"}


class OpKind(IntEnum):
    """`qinfer_op_kind`: which kernel an op calls."""

    LINEAR = 1
    EMBED = 2
    NORM = 3
    SILU_MUL = 4
    QUANTIZE = 5
    GATHER = 6
    ROPE_STORE = 7
    ATTENTION = 8
    MERGE = 9
    ARGMAX = 10
    SAMPLE = 11
    FAULTS = 12
    LINEAR_BF16 = 13

    @property
    def available(self) -> bool:
        """Whether the library is there and its instruction set in use has such an op."""
        library = native.load()
        return library is not None and bool(library.handle.qinfer_has_op(int(self)))


class OpArgs(ctypes.Structure):
    """`qinfer_op`."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("args", ctypes.c_void_p),
    )


class Int8Rows(ctypes.Structure):
    """`qinfer_int8_rows`."""

    _fields_ = (
        ("groups", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
    )


class EmbedArgs(ctypes.Structure):
    """`qinfer_embed`."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("hidden", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("tiled", ctypes.c_int32),
        ("num_tokens", ctypes.c_void_p),
    )


class NormArgs(ctypes.Structure):
    """`qinfer_norm`."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("int8_rows", ctypes.c_void_p),
        ("permutation", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("reserved", ctypes.c_int32),
        ("num_tokens", ctypes.c_void_p),
        ("bad_layers", ctypes.c_void_p),
        ("layer", ctypes.c_int64),
    )


class SiluMulArgs(ctypes.Structure):
    """`qinfer_silu_mul`."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("int8_rows", ctypes.c_void_p),
        ("permutation", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("num_tokens", ctypes.c_void_p),
    )


class QuantizeArgs(ctypes.Structure):
    """`qinfer_quantize`."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("int8_rows", ctypes.c_void_p),
        ("permutation", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("num_tokens", ctypes.c_void_p),
    )


class GatherArgs(ctypes.Structure):
    """`qinfer_gather`."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("num_rows", ctypes.c_void_p),
    )


class ArgmaxArgs(ctypes.Structure):
    """`qinfer_argmax`."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("num_rows", ctypes.c_void_p),
    )


class Int8Buffer:
    """Activations quantized to int8 in groups of 32 columns, as `csrc/program.h` defines them.

    `codes` `[max_rows, padded columns]`, `scales` and `sums` `[max_rows, groups]` are copies out of
    the layout that the kernels read.

    Args:
        max_rows: rows that fit.
        columns: columns of the activations; padded up to whole groups here.
    """

    __slots__ = ("_groups", "args", "shape")

    def __init__(self, max_rows: int, columns: int) -> None:
        blocks, groups = -(-max_rows // _ROW_BLOCK), -(-columns // ACTIVATION_GROUP)
        self.shape = (max_rows, groups * ACTIVATION_GROUP)
        # In words: 8 quads of codes, the scale, the sum and -8 times the codes' sum of each row.
        self._groups = torch.zeros(blocks, groups, 11, _ROW_BLOCK, dtype=torch.int32)
        self.args = Int8Rows(self._groups.data_ptr(), self.shape[1])

    @property
    def pointer(self) -> int:
        """Address of the `qinfer_int8_rows`; valid while this object lives."""
        return ctypes.addressof(self.args)

    @property
    def nbytes(self) -> int:
        """Bytes that the buffer holds."""
        return self._groups.nbytes

    @property
    def codes(self) -> torch.Tensor:
        """The codes, int8."""
        quads = self._groups[:, :, :8].permute(0, 3, 1, 2).contiguous()
        return quads.view(torch.int8).view(-1, self.shape[1])[: self.shape[0]]

    @property
    def scales(self) -> torch.Tensor:
        """The scale of each group, float32."""
        return self._per_group(8).view(torch.float32)

    @property
    def sums(self) -> torch.Tensor:
        """The scale times the sum of each group's codes, float32."""
        return self._per_group(9).view(torch.float32)

    def _per_group(self, word: int) -> torch.Tensor:
        rows = self._groups[:, :, word].transpose(1, 2).contiguous()
        return rows.view(-1, self._groups.shape[1])[: self.shape[0]]

    def dequantize(self) -> torch.Tensor:
        """Return the rows as float32 `[max_rows, padded columns]`."""
        return self.codes.float() * self.scales.repeat_interleave(ACTIVATION_GROUP, dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """An RMSNorm.

    Args:
        weight: float32 `[size]`.
        eps: added to the mean of squares.
        watch: notes which rows are not finite.
    """

    weight: torch.Tensor
    eps: float
    watch: "Watch | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class Watch:
    """Where a norm notes rows that are not finite.

    Args:
        bad_layers: int64 `[max_tokens]`; -1 where nothing was noted yet.
        layer: what to note.
    """

    bad_layers: torch.Tensor
    layer: int


class Program:
    """Ops in the order in which they run."""

    __slots__ = ("_array", "_kept", "_ops")

    def __init__(self) -> None:
        self._ops: list[tuple[OpKind, ctypes.Structure]] = []
        self._kept: list[object] = []
        self._array: ctypes.Array[OpArgs] | None = None

    def __len__(self) -> int:
        return len(self._ops)

    def add(self, kind: OpKind, args: ctypes.Structure, *kept: object) -> None:
        """Append an op.

        Args:
            kind: the kernel.
            args: its struct; kept alive by the program.
            kept: tensors, buffers and structs that `args` points at; kept alive too.
        """
        self._ops.append((kind, args))
        self._kept.extend(kept)
        self._array = None

    def run(self, threads: int) -> None:
        """Run all ops on a team of `threads` threads; the interpreter lock is free meanwhile.

        Raises:
            ConfigError: the library is not there, or `threads` is out of range.
            QinferError: the library refused an op, or the system has no thread left.
        """
        library = native.require()
        if not 1 <= threads <= MAX_THREADS:
            raise ConfigError(f"threads is {threads}; it must be 1 to {MAX_THREADS}")
        if self._array is None:
            ops = (OpArgs(kind, 0, ctypes.addressof(args)) for kind, args in self._ops)
            self._array = (OpArgs * len(self._ops))(*ops)
        status = library.handle.qinfer_run(self._array, len(self._ops), threads)
        if status != 0:
            reason = _STATUS.get(status, "unknown")
            raise QinferError(f"the C++ kernels refused a program (status {status}: {reason})")

    def embed(
        self,
        table: torch.Tensor,
        token_ids: torch.Tensor,
        out: torch.Tensor,
        num_tokens: torch.Tensor,
    ) -> None:
        """Append `out[t] = table[token_ids[t]]`.

        Args:
            table: float32 or bfloat16 `[vocab, hidden]`.
            token_ids: int64 `[max_tokens]`; the caller checks that they are in the table.
            out: float32 `[max_tokens, hidden]`.
            num_tokens: int64 `[1]`, read when the program runs (as in the ops below).
        """
        if table.dtype not in TABLE_DTYPES:
            raise ConfigError(f"table is {table.dtype}; the C++ kernels read float32 and bfloat16")
        rows, hidden = _rows("out", out)
        args = EmbedArgs(
            table=pointer("table", table, table.dtype, (table.shape[0], hidden)),
            token_ids=pointer("token_ids", token_ids, torch.int64, (rows,)),
            out=out.data_ptr(),
            hidden=hidden,
            dtype=TABLE_DTYPES[table.dtype],
            num_tokens=pointer("num_tokens", num_tokens, torch.int64, (1,)),
        )
        self.add(OpKind.EMBED, args, table, token_ids, out, num_tokens)

    def norm(
        self,
        x: torch.Tensor,
        norm: Norm,
        num_tokens: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        int8: Int8Buffer | None = None,
        permutation: torch.Tensor | None = None,
    ) -> None:
        """Append the RMSNorm of each row of `x`, as float32, quantized, or both.

        Args:
            x: float32 `[max_tokens, size]`.
            norm: weight `[size]`, eps, and who notes rows that are not finite.
            num_tokens: int64 `[1]`.
            out: float32 `[max_tokens, size]`.
            int8: `[max_tokens, size]`, padded.
            permutation: int32 `[size]`; quantized column k is column `permutation[k]`.
        """
        shape = _rows("x", x)
        args = NormArgs(
            x=x.data_ptr(),
            weight=pointer("weight", norm.weight, torch.float32, (shape[1],)),
            size=shape[1],
            eps=norm.eps,
            num_tokens=pointer("num_tokens", num_tokens, torch.int64, (1,)),
        )
        args.out, args.int8_rows, args.permutation = _outputs(shape, out, int8, permutation)
        if norm.watch is not None:
            bad_layers = norm.watch.bad_layers
            args.bad_layers = pointer("bad_layers", bad_layers, torch.int64, (shape[0],))
            args.layer = norm.watch.layer
        self.add(OpKind.NORM, args, x, norm, num_tokens, out, int8, permutation)

    def silu_mul(
        self,
        x: torch.Tensor,
        num_tokens: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        int8: Int8Buffer | None = None,
        permutation: torch.Tensor | None = None,
    ) -> None:
        """Append `silu(x[:, :size]) * x[:, size:]` of float32 `x` `[max_tokens, 2 * size]`.

        The other arguments are as in `norm`.
        """
        rows, columns = _rows("x", x)
        if columns % 2:
            raise ConfigError(f"x has {columns} columns; gate and up need an even number")
        args = SiluMulArgs(
            x=x.data_ptr(),
            size=columns // 2,
            num_tokens=pointer("num_tokens", num_tokens, torch.int64, (1,)),
        )
        outputs = _outputs((rows, columns // 2), out, int8, permutation)
        args.out, args.int8_rows, args.permutation = outputs
        self.add(OpKind.SILU_MUL, args, x, num_tokens, out, int8, permutation)

    def quantize(
        self,
        x: torch.Tensor,
        num_tokens: torch.Tensor,
        int8: Int8Buffer,
        *,
        permutation: torch.Tensor | None = None,
    ) -> None:
        """Append the quantization of float32 `x` `[max_tokens, size]`; arguments as in `norm`."""
        shape = _rows("x", x)
        args = QuantizeArgs(
            x=x.data_ptr(),
            size=shape[1],
            num_tokens=pointer("num_tokens", num_tokens, torch.int64, (1,)),
        )
        _, args.int8_rows, args.permutation = _outputs(shape, None, int8, permutation)
        self.add(OpKind.QUANTIZE, args, x, num_tokens, int8, permutation)

    def gather(
        self, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, num_rows: torch.Tensor
    ) -> None:
        """Append `out[r] = x[rows[r]]`.

        Args:
            x: float32 `[max_tokens, size]`.
            rows: int64 `[max_rows]`; the caller checks that they are rows of `x`.
            out: float32 `[max_rows, size]`.
            num_rows: int64 `[1]`.
        """
        _, size = _rows("x", x)
        args = GatherArgs(
            x=x.data_ptr(),
            rows=pointer("rows", rows, torch.int64, (rows.numel(),)),
            out=pointer("out", out, torch.float32, (rows.numel(), size)),
            size=size,
            num_rows=pointer("num_rows", num_rows, torch.int64, (1,)),
        )
        self.add(OpKind.GATHER, args, x, rows, out, num_rows)

    def argmax(self, x: torch.Tensor, out: torch.Tensor, num_rows: torch.Tensor) -> None:
        """Append the lowest index of each row's largest value; -1 for a row that is not finite.

        Args:
            x: float32 `[max_rows, size]`.
            out: int64 `[max_rows]`.
            num_rows: int64 `[1]`.
        """
        rows, size = _rows("x", x)
        args = ArgmaxArgs(
            x=x.data_ptr(),
            out=pointer("out", out, torch.int64, (rows,)),
            size=size,
            num_rows=pointer("num_rows", num_rows, torch.int64, (1,)),
        )
        self.add(OpKind.ARGMAX, args, x, out, num_rows)


def pointer(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the address of a tensor, after a check that the kernels can read it as described.

    Raises:
        ConfigError: it is not on the CPU, not contiguous, or of another dtype or shape.
    """
    fits = tensor.dtype == dtype and tensor.shape == tuple(shape)
    if not (fits and tensor.device.type == "cpu" and tensor.is_contiguous()):
        raise ConfigError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, strides "
            f"{tensor.stride()}; the C++ kernels need contiguous {tuple(shape)} {dtype} on cpu"
        )
    return tensor.data_ptr()


def _rows(name: str, x: torch.Tensor) -> tuple[int, int]:
    """Return the shape of activations, after a check that they are float32 rows."""
    if x.dim() != 2 or x.shape[1] == 0:
        raise ConfigError(f"{name} has shape {tuple(x.shape)}; it must be [rows, columns]")
    pointer(name, x, torch.float32, x.shape)
    return x.shape[0], x.shape[1]


def _outputs(
    shape: tuple[int, int],
    out: torch.Tensor | None,
    int8: Int8Buffer | None,
    permutation: torch.Tensor | None,
) -> tuple[int | None, int | None, int | None]:
    """Return the addresses of an op's outputs for rows of `shape`."""
    if out is None and int8 is None:
        raise ConfigError("an op without out and int8 would compute nothing")
    rows, columns = shape
    padded = -(-columns // ACTIVATION_GROUP) * ACTIVATION_GROUP
    if int8 is not None and int8.shape != (rows, padded):
        raise ConfigError(f"int8 is {int8.shape}; rows {shape} need {(rows, padded)}")
    return (
        None if out is None else pointer("out", out, torch.float32, shape),
        None if int8 is None else int8.pointer,
        None if permutation is None else _permutation(permutation, columns),
    )


def _permutation(permutation: torch.Tensor, columns: int) -> int:
    """Return the address of a permutation; one that is none would read outside the rows."""
    address = pointer("permutation", permutation, torch.int32, (columns,))
    if not torch.equal(permutation.sort().values, torch.arange(columns, dtype=torch.int32)):
        raise ConfigError("permutation does not name every column once")
    return address
