"""Ops over the paged cache for programs: rotation with the page write, and attention.

Owns the ctypes view of `csrc/attention.h`. Knows nothing of layers; which blocks a sequence has is
the caller's business, and indices are not checked here.
"""

import ctypes
import math
from dataclasses import dataclass

import torch

from qinfer.errors import ConfigError
from qinfer.kernels.cpu import native
from qinfer.kernels.cpu.program import Int8Buffer, OpKind, Program, pointer
from qinfer.kernels.spec import PagedKV
from qinfer.schemes import KVScheme

MAX_HEAD_DIM = 512
_KINDS = {"fp32": 0, "fp16": 1, "bf16": 2, "fp8_e4m3": 3, "int8": 4}


class Pages(ctypes.Structure):
    """`qinfer_pages`."""

    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("k_scales", ctypes.c_void_p),
        ("v_scales", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
    )


class RopeStoreArgs(ctypes.Structure):
    """`qinfer_rope_store`."""

    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("pages", Pages),
        ("num_heads", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("num_tokens", ctypes.c_void_p),
    )


class AttentionArgs(ctypes.Structure):
    """`qinfer_attention`."""

    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("int8_rows", ctypes.c_void_p),
        ("permutation", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("query_starts", ctypes.c_void_p),
        ("num_sequences", ctypes.c_void_p),
        ("table_width", ctypes.c_void_p),
        ("pages", Pages),
        ("num_heads", ctypes.c_int32),
        ("sliding_window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class StepIndex:
    """The index tensors of a step, read when the program runs; int64.

    Args:
        positions: `[max_tokens]`, position of each token in its sequence.
        slots: `[max_tokens]`, `block_id * block_size + offset` of each token.
        block_tables: flat, holds `[sequences, table_width]`.
        seq_lens: `[max_sequences]`, tokens in the cache after the step.
        query_starts: `[max_sequences + 1]`, first token of each sequence in the step.
        num_tokens: `[1]`.
        num_sequences: `[1]`.
        table_width: `[1]`, blocks per row of `block_tables`.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    num_tokens: torch.Tensor
    num_sequences: torch.Tensor
    table_width: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """What happens to queries and keys before they are stored and used.

    Args:
        cos: float32 `[positions, head_dim / 2]`.
        sin: the same.
        q_norm: float32 `[head_dim]`, weight of the RMSNorm of each query head; None = no norm.
        k_norm: the same for keys.
        eps: added to the mean of squares.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


def unsupported_reason(num_heads: int, num_kv_heads: int, head_dim: int) -> str | None:
    """Return why the ops cannot run heads like these, or None if they can."""
    if num_heads % num_kv_heads:
        return f"{num_heads} query heads are no multiple of {num_kv_heads} kv heads"
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        return f"head_dim {head_dim} is odd or above {MAX_HEAD_DIM}"
    return None


def scratch_floats(
    threads: int, max_context: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> int:
    """Return the float32 elements of scratch that attention needs, whatever the batch.

    Args:
        threads: most threads that will run the program.
        max_context: most tokens of a sequence.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: elements per head.

    Raises:
        ConfigError: the library is not there, or there are no such sizes.
    """
    library = native.require()
    size = library.handle.qinfer_attention_scratch
    size.restype = ctypes.c_int64
    size.argtypes = (ctypes.c_int32, ctypes.c_int64, *(ctypes.c_int32,) * 3)
    sizes = (threads, max_context, num_heads, num_kv_heads, head_dim)
    floats: int = size(*sizes)
    if floats < 0:
        raise ConfigError(
            f"attention cannot run {threads} threads, {max_context} positions, {num_heads}/"
            f"{num_kv_heads} heads of {head_dim}"
        )
    return floats


def rope_store(
    program: Program,
    qkv: torch.Tensor,
    rotation: Rotation,
    cache: PagedKV,
    scheme: KVScheme,
    index: StepIndex,
) -> None:
    """Append: normalize (if asked) and rotate q in place and k, store k and v in their slots.

    Args:
        program: gets the op.
        qkv: float32 `[max_tokens, (heads + 2 * kv_heads) * head_dim]`.
        rotation: the tables.
        cache: one layer's pages.
        scheme: how the pages store elements.
        index: of the step.

    Raises:
        ConfigError: shapes or types do not fit together.
    """
    pages = _pages(cache, scheme)
    num_heads = _num_heads(qkv, pages)
    table = (rotation.cos.shape[0], pages.head_dim // 2)
    norm = (pages.head_dim,)
    tokens = (qkv.shape[0],)
    args = RopeStoreArgs(
        qkv=pointer("qkv", qkv, torch.float32, qkv.shape),
        cos=pointer("cos", rotation.cos, torch.float32, table),
        sin=pointer("sin", rotation.sin, torch.float32, table),
        positions=pointer("positions", index.positions, torch.int64, tokens),
        slots=pointer("slots", index.slots, torch.int64, tokens),
        q_norm=_optional("q_norm", rotation.q_norm, torch.float32, norm),
        k_norm=_optional("k_norm", rotation.k_norm, torch.float32, norm),
        pages=pages,
        num_heads=num_heads,
        eps=rotation.eps,
        num_tokens=pointer("num_tokens", index.num_tokens, torch.int64, (1,)),
    )
    program.add(OpKind.ROPE_STORE, args, qkv, rotation, cache, index)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOutput:
    """Where attention puts its rows.

    Args:
        out: float32 `[max_tokens, heads * head_dim]`.
        scratch: float32 `[scratch_floats(...)]`, shared by all layers.
        int8: also gets the rows, quantized.
        permutation: int32 `[heads * head_dim]`; quantized column k is column `permutation[k]`.
    """

    out: torch.Tensor
    scratch: torch.Tensor
    int8: Int8Buffer | None = None
    permutation: torch.Tensor | None = None


def attention(
    program: Program,
    qkv: torch.Tensor,
    output: AttentionOutput,
    cache: PagedKV,
    scheme: KVScheme,
    index: StepIndex,
    sliding_window: int | None = None,
) -> None:
    """Append causal attention with the queries in `qkv` over the cache: two ops.

    Args:
        program: gets the ops.
        qkv: as in `rope_store`; only the queries are read.
        output: where the rows go.
        cache: one layer's pages.
        scheme: how the pages store elements.
        index: of the step.
        sliding_window: tokens that a query sees, itself included; None = all before it.

    Raises:
        ConfigError: shapes or types do not fit together.
    """
    pages = _pages(cache, scheme)
    num_heads = _num_heads(qkv, pages)
    columns = num_heads * pages.head_dim
    args = AttentionArgs(
        qkv=pointer("qkv", qkv, torch.float32, qkv.shape),
        out=pointer("out", output.out, torch.float32, (qkv.shape[0], columns)),
        scratch=pointer("scratch", output.scratch, torch.float32, output.scratch.shape),
        int8_rows=None if output.int8 is None else output.int8.pointer,
        permutation=_optional("permutation", output.permutation, torch.int32, (columns,)),
        block_tables=index.block_tables.data_ptr(),
        seq_lens=index.seq_lens.data_ptr(),
        query_starts=index.query_starts.data_ptr(),
        num_sequences=pointer("num_sequences", index.num_sequences, torch.int64, (1,)),
        table_width=pointer("table_width", index.table_width, torch.int64, (1,)),
        pages=pages,
        num_heads=num_heads,
        sliding_window=sliding_window or 0,
        scale=1.0 / math.sqrt(pages.head_dim),
    )
    for kind in (OpKind.ATTENTION, OpKind.MERGE):
        program.add(kind, args, qkv, output, cache, index)


def _pages(cache: PagedKV, scheme: KVScheme) -> Pages:
    """Return the C view of a layer's pages."""
    element = cache.k.dtype
    if element.itemsize != scheme.element_bytes:
        raise ConfigError(f"pages of {element} do not hold {scheme} elements")
    shape = cache.k.shape
    scales = shape[:3] if scheme.quantized else ()
    if scheme.quantized in (cache.k_scales is None, cache.v_scales is None):
        raise ConfigError(f"{scheme} pages have scales exactly if their elements are codes")
    return Pages(
        k=pointer("k", cache.k, element, shape),
        v=pointer("v", cache.v, element, shape),
        k_scales=_optional("k_scales", cache.k_scales, torch.bfloat16, scales),
        v_scales=_optional("v_scales", cache.v_scales, torch.bfloat16, scales),
        kind=_KINDS[scheme.dtype],
        block_size=shape[1],
        num_kv_heads=shape[2],
        head_dim=shape[3],
    )


def _num_heads(qkv: torch.Tensor, pages: Pages) -> int:
    """Return the query heads of `qkv`."""
    num_kv_heads, head_dim = int(pages.num_kv_heads), int(pages.head_dim)
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if (num_heads + 2 * num_kv_heads) * head_dim != qkv.shape[1] or num_heads < 1:
        raise ConfigError(
            f"qkv has {qkv.shape[1]} columns, which do not hold q and {num_kv_heads} k and v "
            f"heads of {head_dim}"
        )
    reason = unsupported_reason(num_heads, num_kv_heads, head_dim)
    if reason is not None:
        raise ConfigError(reason)
    return num_heads


def _optional(
    name: str, tensor: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]
) -> int | None:
    return None if tensor is None else pointer(name, tensor, dtype, shape)
