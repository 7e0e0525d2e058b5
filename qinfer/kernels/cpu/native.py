"""The C++ kernels: finds and loads the library, packs weights for it, and calls it.

Knows the C interface of `csrc/qinfer_cpu.h` and nothing of layers. Calls go through ctypes, so
the interpreter lock is free while a kernel runs.
"""

import ctypes
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from qinfer import env
from qinfer.errors import ConfigError
from qinfer.formats.weight import QuantizedWeight
from qinfer.kernels import cpu

ABI_VERSION = 8
LIBRARY_NAME = "libqinfer_cpu.so"
# By the width of the codes, the bits that one takes in memory.
HELD_BITS = {2: 4, 3: 4, 4: 4, 8: 8}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}

logger = logging.getLogger(__name__)


class WeightArgs(ctypes.Structure):
    """`qinfer_weight` of the C header."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("group_index", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("bits", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class NativeLibrary:
    """The loaded library.

    Args:
        path: where it was found.
        handle: its functions, with their argument types declared.
    """

    path: Path
    handle: ctypes.CDLL

    @property
    def isa(self) -> str:
        """The instruction set in use: `avx512`, `avx2` or `portable`."""
        name: bytes = self.handle.qinfer_isa()
        return name.decode()

    def use_isa(self, name: str) -> bool:
        """Switch to another instruction set; False if this machine or build lacks it."""
        return bool(self.handle.qinfer_use_isa(name.encode()) == 0)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A quantized weight in the layout that the kernels read.

    Args:
        codes: 4 bits: uint8 `[out, ceil(in / 2)]`, the low nibble is the even column and a nibble
            is code + 8. 8 bits: int8 `[out, in]`.
        scales: float32 `[out, groups]`.
        zeros: float32 `[out, groups]`, shifted like the codes; None = all 0.
        offsets: float32 `[out, groups]`, the value of the smallest code; None = there are none.
        group_index: int32 `[in]`, the group of each column; None = `k // group_size`.
        bits: 4 or 8; narrower codes are held in 4.
        in_features: columns of the weight.
        group_size: columns per group where `group_index` is None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    offsets: torch.Tensor | None
    group_index: torch.Tensor | None
    bits: int
    in_features: int
    group_size: int

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.codes.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that the weight keeps resident."""
        parts = (self.codes, self.scales, self.zeros, self.offsets, self.group_index)
        return sum(part.nbytes for part in parts if part is not None)


def unsupported_reason(bits: int) -> str | None:
    """Return why weights of this width cannot be packed, or None if they can."""
    if bits in HELD_BITS:
        return None
    return f"{bits}-bit codes have no C++ kernel (there are {widths(HELD_BITS)} bits)"


def held_note(bits: int) -> str:
    """Return what a report adds where codes are held wider than they are, else nothing."""
    held = HELD_BITS.get(bits, bits)
    return "" if held == bits else f", held in {held} bits"


def widths(bits: Iterable[int]) -> str:
    """Return numbers as text, such as `2, 4 and 8`."""
    *most, last = (str(width) for width in bits)
    return f"{', '.join(most)} and {last}"


def load() -> NativeLibrary | None:
    """Return the library, or None, with one logged line, if it is absent or switched off."""
    found = find()
    return found if isinstance(found, NativeLibrary) else None


def missing_reason() -> str | None:
    """Return why there are no C++ kernels, or None if there are."""
    found = find()
    return found if isinstance(found, str) else None


def require() -> NativeLibrary:
    """Return the library.

    Raises:
        ConfigError: it is absent or switched off; says why.
    """
    found = find()
    if isinstance(found, str):
        raise ConfigError(found)
    return found


@cache
def find() -> NativeLibrary | str:
    """Return the library, or why it cannot be used, which is logged once."""
    found = _open()
    if isinstance(found, str):
        level = logging.WARNING if env.native_enabled() else logging.INFO
        logger.log(level, "%s; using the slower torch reference", found)
    return found


def _open() -> NativeLibrary | str:
    if not env.native_enabled():
        return "the C++ kernels are switched off (QINFER_NATIVE=0)"
    paths = [Path(folder) / LIBRARY_NAME for folder in cpu.__path__]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return "the C++ kernels were not built (no compiler at installation?)"
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return f"cannot load {path} ({error})"
    version = handle.qinfer_abi_version()
    if version != ABI_VERSION:
        return f"{path} has interface version {version}, not {ABI_VERSION}: install qinfer again"
    _declare(handle)
    return NativeLibrary(path, handle)


def pack(weight: QuantizedWeight) -> PackedWeight:
    """Return a weight in the layout of the kernels; scales become float32 exactly.

    Raises:
        ConfigError: the kernels have no such width, the weight is not on the CPU, or its shapes
            or group index do not fit together.
    """
    bits = weight.scheme.bits
    reason = unsupported_reason(bits)
    if reason is not None:
        raise ConfigError(reason)
    if weight.codes.device.type != "cpu":
        raise ConfigError(f"the C++ kernels run on the CPU, the weight is on {weight.codes.device}")
    check_groups(weight)
    held = HELD_BITS[bits]
    codes = widened_codes(weight, held)
    zeros, offsets, index = weight.zeros, weight.offsets, weight.group_index
    return PackedWeight(
        codes=_pack_nibbles(codes) if held == 4 else codes,
        scales=weight.scales.float().contiguous(),
        zeros=None if zeros is None else zeros.float().contiguous(),
        offsets=None if offsets is None else offsets.float().contiguous(),
        group_index=None if index is None else index.to(torch.int32).contiguous(),
        bits=held,
        in_features=weight.in_features,
        group_size=weight.scheme.group_size or max(1, weight.in_features),
    )


def dequantize(
    weight: PackedWeight,
    dtype: torch.dtype = torch.float32,
    *,
    rows: tuple[int, int] | None = None,
    out: torch.Tensor | None = None,
    threads: int = 1,
) -> torch.Tensor:
    """Return dense rows `[stop - start, in]`, equal to `QuantizedWeight.dequantize` to the bit.

    Args:
        weight: the packed weight.
        dtype: float32 or bfloat16.
        rows: start and stop of the rows wanted; None = all.
        out: where to write them, contiguous, of that shape and type; None = a new tensor.
        threads: threads to use at most; small pieces take fewer.

    Raises:
        ConfigError: the library is not there, or rows, dtype or `out` do not fit.
    """
    library = require()
    if dtype not in _DTYPES:
        raise ConfigError(f"the C++ kernels write float32 or bfloat16, not {dtype}")
    start, stop = rows if rows is not None else (0, weight.out_features)
    if not 0 <= start <= stop <= weight.out_features:
        raise ConfigError(f"rows {start}:{stop} are outside 0:{weight.out_features}")
    shape = (stop - start, weight.in_features)
    if out is None:
        out = torch.empty(shape, dtype=dtype)
    elif out.shape != shape or out.dtype != dtype or not out.is_contiguous():
        raise ConfigError(
            f"out is {tuple(out.shape)} {out.dtype}; it must be contiguous {shape} {dtype}"
        )
    if out.numel() == 0:
        return out
    status = library.handle.qinfer_dequantize(
        ctypes.byref(_describe(weight)), start, stop, _DTYPES[dtype], out.data_ptr(), threads
    )
    if status != 0:
        raise ConfigError(f"the C++ dequantize kernel refused its arguments (status {status})")
    return out


def _declare(handle: ctypes.CDLL) -> None:
    handle.qinfer_isa.restype = ctypes.c_char_p
    handle.qinfer_use_isa.argtypes = (ctypes.c_char_p,)
    handle.qinfer_dequantize.argtypes = (
        ctypes.POINTER(WeightArgs),
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_int32,
    )
    handle.qinfer_pack_pairs.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    )
    handle.qinfer_add_gram.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    handle.qinfer_run.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)


def _describe(weight: PackedWeight) -> WeightArgs:
    """Return the C view of a weight; valid while `weight` lives."""
    return WeightArgs(
        codes=weight.codes.data_ptr(),
        scales=weight.scales.data_ptr(),
        zeros=None if weight.zeros is None else weight.zeros.data_ptr(),
        offsets=None if weight.offsets is None else weight.offsets.data_ptr(),
        group_index=None if weight.group_index is None else weight.group_index.data_ptr(),
        out_features=weight.out_features,
        in_features=weight.in_features,
        num_groups=weight.scales.shape[1],
        group_size=weight.group_size,
        bits=weight.bits,
    )


def check_groups(weight: QuantizedWeight) -> None:
    """Refuse what would make a kernel read outside its tensors."""
    rows, num_groups = weight.out_features, weight.scales.shape[1]
    named = {"scales": weight.scales, "zeros": weight.zeros, "offsets": weight.offsets}
    for name, tensor in named.items():
        if tensor is not None and tensor.shape != (rows, num_groups):
            raise ConfigError(
                f"{name} has shape {tuple(tensor.shape)}, expected {(rows, num_groups)}"
            )
    if weight.zeros is not None and weight.offsets is not None:
        raise ConfigError("a weight has zeros or offsets, not both")
    index = weight.group_index
    if index is None:
        needed = weight.scheme.num_groups(weight.in_features)
        if num_groups < needed:
            raise ConfigError(f"scales hold {num_groups} groups, {weight.scheme} needs {needed}")
        return
    if index.shape != (weight.in_features,):
        raise ConfigError(f"group index has shape {tuple(index.shape)}, not one entry per input")
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < num_groups:
        raise ConfigError(f"group index names a group outside 0:{num_groups}")


def widened_codes(weight: QuantizedWeight, bits: int) -> torch.Tensor:
    """Return the codes as `bits` wide ones, int8 `[out, in]`, contiguous.

    Zero points count from the middle of the range, so those codes keep their numbers; offsets
    count from the smallest code, which is another then.
    """
    codes = weight.codes.to(torch.int8).contiguous()
    if weight.offsets is None or weight.scheme.bits == bits:
        return codes
    return codes + (1 << (weight.scheme.bits - 1)) - (1 << (bits - 1))


def _pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    unsigned = (codes + 8).to(torch.uint8)  # [out, in]
    if unsigned.shape[1] % 2:
        unsigned = torch.nn.functional.pad(unsigned, (0, 1), value=8)
    return unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)
