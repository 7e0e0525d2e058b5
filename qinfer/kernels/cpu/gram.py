"""Sums of products of columns over tokens in bf16, by C++; `csrc/gram.h` says what it computes."""

import ctypes
from dataclasses import dataclass

import torch

from qinfer.errors import ConfigError
from qinfer.kernels.cpu import native

PANEL = 16  # QINFER_GRAM_PANEL: rows of a call begin at a multiple


class GramArgs(ctypes.Structure):
    """`qinfer_gram`."""

    _fields_ = (
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("left_columns", ctypes.c_int64),
        ("right_columns", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("upper", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Rows in the form that the products are taken of.

    Args:
        data: bfloat16 `[panels, pairs, 16, 2]`: panels of columns and pairs of tokens, both padded
            with zeros.
        tokens: rows.
        columns: of a row.
    """

    data: torch.Tensor
    tokens: int
    columns: int


def available() -> bool:
    """Tell whether there are such products: the library, and a CPU that multiplies bf16 pairs."""
    library = native.load()
    return library is not None and bool(library.handle.qinfer_has_gram())


def pack(x: torch.Tensor) -> PackedRows:
    """Round rows to bf16 (to nearest, ties to even; denormals become zero) and pack them.

    Args:
        x: float32 `[tokens, columns]` on the CPU, the columns of a row adjacent.

    Raises:
        ConfigError: there are no such products here, or `x` is not such rows.
    """
    fits = x.ndim == 2 and x.dtype == torch.float32 and x.device.type == "cpu"
    if not fits or not x.shape[1] or x.stride(1) != 1:
        raise ConfigError(
            f"x is {tuple(x.shape)} {x.dtype} on {x.device}; it must be float32 "
            "[tokens, columns] on the CPU, each row contiguous"
        )
    tokens, columns = x.shape
    # Torch aligns to 64 bytes.
    data = torch.empty(_shape(tokens, columns), dtype=torch.bfloat16)
    if tokens:
        status = native.require().handle.qinfer_pack_pairs(
            x.data_ptr(), tokens, columns, max(x.stride(0), columns), data.data_ptr()
        )
        _check(status)
    return PackedRows(data, tokens, columns)


def add(
    sums: torch.Tensor,
    left: PackedRows,
    right: PackedRows,
    *,
    rows: tuple[int, int] | None = None,
    upper: bool = False,
) -> None:
    """Add `Σ_t left[t, i] right[t, j]` to `sums[i, j]`.

    The products are exact and summed in float32: over chunks of 512 tokens in ascending order, from
    zero, each chunk's sum then added to `sums`. No bit depends on how rows are spread over calls.

    Args:
        sums: float32 `[left.columns, right.columns]`, contiguous.
        left: of the rows of the sums.
        right: of their columns, of as many tokens.
        rows: start and stop of those to add to, the start a multiple of `PANEL`; None = all.
        upper: only elements on and above the diagonal are wanted; those below may get anything.

    Raises:
        ConfigError: there are no such products here, or the arguments do not fit.
    """
    shape, (start, stop) = (left.columns, right.columns), rows or (0, left.columns)
    if sums.shape != shape or sums.dtype != torch.float32 or not sums.is_contiguous():
        raise ConfigError(
            f"sums are {tuple(sums.shape)} {sums.dtype}; they must be contiguous {shape} float32"
        )
    if left.tokens != right.tokens:
        raise ConfigError(f"{left.tokens} tokens cannot be paired with {right.tokens}")
    for packed in (left, right):
        _check_held(packed)
    args = GramArgs(
        left=left.data.data_ptr(),
        right=right.data.data_ptr(),
        sums=sums.data_ptr(),
        tokens=left.tokens,
        left_columns=left.columns,
        right_columns=right.columns,
        stride=right.columns,
        upper=int(upper),
    )
    if left.tokens:
        _check(native.require().handle.qinfer_add_gram(ctypes.byref(args), start, stop))


def _check_held(packed: PackedRows) -> None:
    """Refuse what would make the kernel read outside its tensor."""
    data, shape = packed.data, _shape(packed.tokens, packed.columns)
    if data.shape != shape or data.dtype != torch.bfloat16 or not data.is_contiguous():
        raise ConfigError(
            f"packed rows of {tuple(data.shape)} {data.dtype} do not hold {packed.tokens} tokens "
            f"of {packed.columns} columns"
        )


def _shape(tokens: int, columns: int) -> tuple[int, int, int, int]:
    return -(-columns // PANEL), -(-tokens // 2), PANEL, 2


def _check(status: int) -> None:
    if status != 0:
        raise ConfigError(
            f"the C++ kernel of bf16 products refused its arguments (status {status}), or this "
            "machine has none"
        )
