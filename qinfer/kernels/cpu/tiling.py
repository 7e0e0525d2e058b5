"""Repacks weights into tiles when a model is loaded, a piece of some rows at a time.

So a weight need not be in memory twice: of what it is read from there are a few pieces. All pieces
come from the calling thread: in glibc each thread has a heap of its own, which would grow by them.
`csrc/linear.h` defines the tiles.
"""

import ctypes
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future

import torch

from qinfer.errors import ConfigError
from qinfer.formats.weight import QuantizedWeight
from qinfer.kernels.cpu import native
from qinfer.kernels.cpu.arena import ALIGNMENT
from qinfer.kernels.cpu.tiled import (
    CODE_KINDS,
    DENSE_DTYPES,
    DENSE_KINDS,
    ELEMENT_BITS,
    TILE_ROWS,
    TiledWeight,
    WeightKind,
    padded,
    unsupported_reason,
)
from qinfer.kernels.spec import LinearSpec

_PIECE_ELEMENTS = 1 << 18  # of a weight
_WAITING_PIECES = 2  # that may be read while others are repacked

# Returns zeroed bytes, uint8, aligned to 64.
Allocate = Callable[[int], torch.Tensor]
# Returns rows [begin, end) of a weight; every piece of it in the same form.
ReadRows = Callable[[int, int], torch.Tensor | QuantizedWeight]


def aligned_bytes(num_bytes: int) -> torch.Tensor:
    """Return `num_bytes` zeroed bytes, aligned to 64."""
    room = torch.zeros(num_bytes + ALIGNMENT, dtype=torch.uint8)
    start = -room.data_ptr() % ALIGNMENT
    return room[start : start + num_bytes]


def tile(
    weight: torch.Tensor | QuantizedWeight, *, allocate: Allocate = aligned_bytes
) -> TiledWeight:
    """Repack a weight into tiles; see `tile_rows`."""
    if isinstance(weight, QuantizedWeight):
        native.check_groups(weight)
        shape, wide = (weight.out_features, weight.in_features), needs_wide_scales(weight)
        return tile_rows(shape, weight.rows, wide_scales=wide, allocate=allocate)
    shape = (weight.shape[0], weight.shape[1])
    return tile_rows(shape, lambda begin, end: weight[begin:end], allocate=allocate)


def tile_rows(
    shape: tuple[int, int],
    read: ReadRows,
    *,
    wide_scales: bool = False,
    allocate: Allocate = aligned_bytes,
    team: Executor | None = None,
) -> TiledWeight:
    """Repack a weight of which only some rows at a time are in memory.

    Args:
        shape: `[out, in]` of the weight.
        read: returns some rows: dense (float16 becomes float32), or quantized; called by this
            thread only.
        wide_scales: hold scales and offsets as float32, see `needs_wide_scales`; else as float16.
        allocate: where the tiles, scales, zeros and offsets are put.
        team: repacks pieces while the next are read; None = this thread does both.

    Raises:
        ConfigError: the library is absent or the weight cannot be tiled; the message says why.
    """
    step = max(1, _PIECE_ELEMENTS // (TILE_ROWS * max(1, shape[1]))) * TILE_ROWS
    piece = read(0, min(step, shape[0]))
    tiles = _room(piece, shape, torch.float32 if wide_scales else torch.float16, allocate)
    repacking: deque[Future[None]] = deque()
    for begin in range(0, shape[0], step):
        if begin > 0:
            piece = read(begin, min(begin + step, shape[0]))
        if team is None or step >= shape[0]:
            _fill(tiles, begin, piece)
            continue
        repacking.append(team.submit(_fill, tiles, begin, piece))
        if len(repacking) > _WAITING_PIECES:
            repacking.popleft().result()
    for future in repacking:
        future.result()
    return tiles


def _room(
    sample: torch.Tensor | QuantizedWeight,
    shape: tuple[int, int],
    scale_dtype: torch.dtype,
    allocate: Allocate,
) -> TiledWeight:
    """Return empty tiles for a weight of the form of `sample`, which is some of its rows."""
    out_features, in_features = shape
    tiles = -(-out_features // TILE_ROWS)

    def grouped(values: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        if values is None:
            return None
        groups = values.shape[1]
        room = allocate(tiles * groups * TILE_ROWS * dtype.itemsize)
        return room.view(dtype).view(tiles, groups, TILE_ROWS)

    permutation, group_size = None, in_features
    scales = zeros = offsets = None
    if isinstance(sample, QuantizedWeight):
        _check_codes(sample)
        kind = CODE_KINDS[sample.scheme.bits]
        permutation = _permutation(sample)
        group_size = sample.scheme.group_size or in_features
        scales, zeros, offsets = sample.scales, sample.zeros, sample.offsets
    else:
        kind = DENSE_KINDS.get(sample.dtype, WeightKind.FP32)
    return TiledWeight(
        data=allocate(_tile_bytes(kind, out_features, in_features)),
        scales=grouped(scales, scale_dtype),
        zeros=grouped(zeros, torch.int16),
        offsets=grouped(offsets, scale_dtype),
        permutation=permutation,
        kind=kind,
        out_features=out_features,
        in_features=in_features,
        group_size=min(padded(group_size), padded(in_features)),
    )


def _fill(tiles: TiledWeight, begin: int, piece: torch.Tensor | QuantizedWeight) -> None:
    """Repack rows of a weight into their tiles; the first of them begins a tile."""
    first = begin // TILE_ROWS
    target = ctypes.c_void_p(
        tiles.data.data_ptr() + _tile_bytes(tiles.kind, begin, tiles.in_features)
    )
    if isinstance(piece, QuantizedWeight):
        _fill_codes(tiles, first, piece, target)
        return
    source = piece.to(DENSE_DTYPES[tiles.kind]).contiguous()
    _call(
        "qinfer_tile_dense",
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_int64(source.shape[0]),
        ctypes.c_int64(tiles.in_features),
        ctypes.c_int32(tiles.kind),
        target,
    )


def _fill_codes(
    tiles: TiledWeight, first: int, piece: QuantizedWeight, target: ctypes.c_void_p
) -> None:
    if tiles.scales is None:
        raise ConfigError("some rows of a dense weight are quantized")
    order = tiles.permutation
    codes = native.widened_codes(piece, ELEMENT_BITS[tiles.kind])
    _call(
        "qinfer_tile_codes",
        ctypes.c_void_p(codes.data_ptr()),
        ctypes.c_int64(piece.out_features),
        ctypes.c_int64(tiles.in_features),
        ctypes.c_void_p(None if order is None else order.data_ptr()),
        ctypes.c_int32(ELEMENT_BITS[tiles.kind]),
        target,
    )
    _put_groups(_exactly(piece.scales, tiles.scales.dtype), tiles.scales[first:])
    if tiles.zeros is not None and piece.zeros is not None:
        center = 1 << (ELEMENT_BITS[tiles.kind] - 1)
        _put_groups((piece.zeros + center).to(torch.int16), tiles.zeros[first:])
    if tiles.offsets is not None and piece.offsets is not None:
        _put_groups(_exactly(piece.offsets, tiles.offsets.dtype), tiles.offsets[first:])


def _check_codes(weight: QuantizedWeight) -> None:
    """Refuse what has no tiles, or would make the kernel read outside its tensors."""
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


def needs_wide_scales(weight: QuantizedWeight) -> bool:
    """Tell whether float16 cannot hold a weight's scales and offsets exactly."""
    parts = (weight.scales, weight.offsets)
    return not all(part is None or _is_half(part) for part in parts)


def _is_half(values: torch.Tensor) -> bool:
    return values.dtype == torch.float16 or torch.equal(values.half().float(), values.float())


def _exactly(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float16 and not _is_half(values):
        raise ConfigError(f"float16 cannot hold these {values.dtype} scales exactly")
    return values.to(dtype)


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


def _put_groups(values: torch.Tensor, room: torch.Tensor) -> None:
    """Write `[rows, groups]` into the first of `room` `[tiles, groups, 16]`."""
    rows, groups = values.shape
    whole = rows // TILE_ROWS
    tiles = values[: whole * TILE_ROWS].view(whole, TILE_ROWS, groups)
    room[:whole] = tiles.transpose(1, 2)
    if rows % TILE_ROWS:
        room[whole, :, : rows % TILE_ROWS] = values[whole * TILE_ROWS :].T


def _tile_bytes(kind: WeightKind, out_features: int, in_features: int) -> int:
    tiles = -(-out_features // TILE_ROWS)
    return tiles * TILE_ROWS * padded(in_features) * ELEMENT_BITS[kind] // 8


def _call(function: str, *args: object) -> None:
    library = native.require()
    status = library.handle[function](*args)
    if status != 0:
        raise ConfigError(f"{function} refused its arguments (status {status})")
