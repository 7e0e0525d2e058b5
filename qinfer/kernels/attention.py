"""Causal attention over the paged cache: its interface, its candidates and the torch reference.

K and V are always read through the cache, in prefill and in decode. The reference cuts them at
absolute multiples of `KV_TILE` positions, whose partial results merge in ascending order (online
softmax, arXiv 2205.14135, section 3.1), and takes queries in tiles of `ROW_TILE` tokens. Every
product then has one shape whatever the batch, so a row's bits depend on its own sequence alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from qinfer.kernels.reference import (
    ROW_TILE,
    TORCH_KV_DTYPES,
    dequantize_kv,
    elementwise,
    isolate_broken,
    quantize_kv,
)
from qinfer.kernels.select import Choice, Implementation, choose
from qinfer.kernels.spec import AttnSpec, PagedKV

KV_TILE = 128


@dataclass(frozen=True, slots=True, eq=False)
class TileWork:
    """The queries that one KV tile concerns, and the keys they may see in it.

    Args:
        items: int64 `[active]`, indices of query tiles.
        blocks: int64 `[active, KV_TILE / block_size]`, the cache blocks of the tile.
        filled: bool `[active, KV_TILE, 1, 1]`, positions that hold a token of the sequence.
        hidden: bool `[active, 1, ROW_TILE, 1, KV_TILE]`, pairs that causality or window forbid.
    """

    items: torch.Tensor
    blocks: torch.Tensor
    filled: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """What all layers of one step share: made once, run once per layer.

    Args:
        gather: int64 `[items * ROW_TILE]`, the token of each query row; padding rows point at the
            row after the last token, which is zero.
        scatter: int64 `[tokens]`, the query row of each token.
        tiles: the KV tiles in ascending order.
    """

    gather: torch.Tensor
    scatter: torch.Tensor
    tiles: tuple[TileWork, ...]


class Attention(Protocol):
    """One layer kind's attention: store new K and V, plan a step, run a layer."""

    def store(self, k: torch.Tensor, v: torch.Tensor, cache: PagedKV, slots: torch.Tensor) -> None:
        """Quantize and write `k`, `v` `[tokens, kv_heads, head_dim]` to `slots` `[tokens]`."""
        ...

    def plan(
        self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_starts: torch.Tensor
    ) -> AttentionPlan:
        """Prepare a step from the index tensors of `ModelInputs`."""
        ...

    def run(self, q: torch.Tensor, cache: PagedKV, plan: AttentionPlan) -> torch.Tensor:
        """Attend with `q` `[tokens, heads, head_dim]`; returns `[tokens, heads * head_dim]`."""
        ...


PrepareAttention = Callable[[AttnSpec], Attention]
AttentionImplementation = Implementation[AttnSpec, PrepareAttention]


class ReferenceAttention:
    """Paged attention in torch, computed in float32 from the dequantized cache."""

    def __init__(self, spec: AttnSpec) -> None:
        self.spec = spec
        self.scale = 1.0 / math.sqrt(spec.head_dim)

    def store(self, k: torch.Tensor, v: torch.Tensor, cache: PagedKV, slots: torch.Tensor) -> None:
        """Quantize and write `k`, `v` `[tokens, kv_heads, head_dim]` to `slots` `[tokens]`."""
        k, v = isolate_broken(k, v, self.spec.kv)
        _store(k, cache.k, cache.k_scales, slots, self.spec)
        _store(v, cache.v, cache.v_scales, slots, self.spec)

    def plan(
        self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_starts: torch.Tensor
    ) -> AttentionPlan:
        """Prepare a step from the index tensors of `ModelInputs`."""
        lengths = seq_lens.tolist()
        starts = query_starts.tolist()
        queries = _QueryTiles.of(lengths, starts)
        num_tiles = -(-max(lengths) // KV_TILE)
        tiles = [
            self._tile_work(tile * KV_TILE, queries, block_tables, seq_lens)
            for tile in range(num_tiles)
        ]
        return AttentionPlan(
            gather=queries.gather.flatten(),
            scatter=queries.scatter,
            tiles=tuple(work for work in tiles if work is not None),
        )

    def _tile_work(
        self, start: int, queries: "_QueryTiles", block_tables: torch.Tensor, seq_lens: torch.Tensor
    ) -> TileWork | None:
        key = torch.arange(start, start + KV_TILE)
        needed = queries.last >= start
        if self.spec.sliding_window is not None:
            needed &= queries.first - self.spec.sliding_window < start + KV_TILE - 1
        items = needed.nonzero().flatten()
        if items.numel() == 0:
            return None
        sequence = queries.sequence[items]
        position = queries.position[items].unsqueeze(-1)  # [active, ROW_TILE, 1]
        hidden = key > position
        if self.spec.sliding_window is not None:
            hidden |= key <= position - self.spec.sliding_window
        per_tile = KV_TILE // self.spec.block_size
        first_block = start // self.spec.block_size
        column = torch.arange(first_block, first_block + per_tile)
        column = column.clamp(max=block_tables.shape[1] - 1)  # beyond the table nothing is filled
        filled = key < seq_lens[sequence].unsqueeze(-1)
        return TileWork(
            items=items,
            blocks=block_tables[sequence][:, column],
            filled=filled[:, :, None, None],
            hidden=hidden[:, None, :, None, :],
        )

    def run(self, q: torch.Tensor, cache: PagedKV, plan: AttentionPlan) -> torch.Tensor:
        """Attend with `q` `[tokens, heads, head_dim]`; returns `[tokens, heads * head_dim]`."""
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        q32 = torch.cat((q.float() * self.scale, q.new_zeros(1, *q.shape[1:], dtype=torch.float32)))
        rows = q32[plan.gather].view(-1, ROW_TILE, spec.num_kv_heads, group, spec.head_dim)
        rows = rows.transpose(1, 2).contiguous()  # [items, kv_heads, ROW_TILE, group, dim]
        rows = rows.flatten(2, 3)
        top = rows.new_full((*rows.shape[:3], 1), -torch.inf)  # running maximum of the scores
        total = rows.new_zeros(top.shape)
        mixed = torch.zeros_like(rows)
        for work in plan.tiles:
            k = self._load(cache.k, cache.k_scales, work)  # [active, kv_heads, KV_TILE, dim]
            v = self._load(cache.v, cache.v_scales, work)
            scores = _batched(rows[work.items], k.transpose(2, 3))
            shape = (*scores.shape[:2], ROW_TILE, group, KV_TILE)
            scores = scores.view(shape).masked_fill(work.hidden, -torch.inf).flatten(2, 3)
            old = top[work.items]
            new = torch.maximum(old, scores.amax(-1, keepdim=True))
            # A row that has seen no key yet keeps -inf; 0 avoids -inf - -inf.
            base = new.masked_fill(new == -torch.inf, 0.0)
            weights = elementwise(torch.exp, scores - base)
            decay = elementwise(torch.exp, old - base)
            top[work.items] = new
            total[work.items] = total[work.items] * decay + weights.sum(-1, keepdim=True)
            mixed[work.items] = mixed[work.items] * decay + _batched(weights, v)
        out = (mixed / total).view(-1, spec.num_kv_heads, ROW_TILE, group, spec.head_dim)
        out = out.transpose(1, 2).reshape(-1, spec.num_heads * spec.head_dim)
        return out[plan.scatter].to(q.dtype)

    def _load(
        self, stored: torch.Tensor, scales: torch.Tensor | None, work: TileWork
    ) -> torch.Tensor:
        """Return one KV tile of every active query tile, float32, zero where nothing is stored."""
        codes = stored[work.blocks].flatten(1, 2)  # [active, KV_TILE, kv_heads, dim]
        tile_scales = None if scales is None else scales[work.blocks].flatten(1, 2)
        if self.spec.kv.dtype == "fp8_e4m3":
            codes = codes.view(torch.float8_e4m3fn)
        x = dequantize_kv(codes, tile_scales)
        # What is stored there may be left from another sequence, even NaN: 0 * NaN is no zero.
        x = torch.where(work.filled, x, 0.0)
        return x.transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class _QueryTiles:
    """The queries of a step in tiles of `ROW_TILE` tokens of one sequence each."""

    gather: torch.Tensor  # [items, ROW_TILE] token indices
    position: torch.Tensor  # [items, ROW_TILE]; -1 for padding
    sequence: torch.Tensor  # [items]
    first: torch.Tensor  # [items] lowest position
    last: torch.Tensor  # [items] highest position
    scatter: torch.Tensor  # [tokens]

    @staticmethod
    def of(lengths: Sequence[int], starts: Sequence[int]) -> "_QueryTiles":
        num_tokens = starts[-1]
        gather: list[torch.Tensor] = []
        position: list[torch.Tensor] = []
        scatter: list[torch.Tensor] = []
        sequence: list[int] = []
        lane = torch.arange(ROW_TILE)
        for index, length in enumerate(lengths):
            begin, end = starts[index], starts[index + 1]
            for token in range(begin, end, ROW_TILE):
                inside = lane < end - token
                gather.append(torch.where(inside, token + lane, num_tokens))
                position.append(torch.where(inside, length - end + token + lane, -1))
                scatter.append(len(sequence) * ROW_TILE + lane[inside])
                sequence.append(index)
        positions = torch.stack(position)
        return _QueryTiles(
            gather=torch.stack(gather),
            position=positions,
            sequence=torch.tensor(sequence),
            first=positions[:, 0],
            last=positions.amax(-1),
            scatter=torch.cat(scatter),
        )


def _batched(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply `[a, b, m, k] @ [a, b, k, n]` as one batch of equal products."""
    out = torch.bmm(left.flatten(0, 1), right.flatten(0, 1))
    return out.view(*left.shape[:2], *out.shape[1:])


def _store(
    x: torch.Tensor,
    stored: torch.Tensor,
    scales: torch.Tensor | None,
    slots: torch.Tensor,
    spec: AttnSpec,
) -> None:
    codes, new_scales = quantize_kv(x, spec.kv)
    if spec.kv.dtype == "fp8_e4m3":
        codes = codes.view(torch.uint8)
    stored.flatten(0, 1).index_copy_(0, slots, codes)
    if scales is not None and new_scales is not None:
        scales.flatten(0, 1).index_copy_(0, slots, new_scales)


def _supports_reference(spec: AttnSpec) -> str | None:
    if spec.device != "cpu":
        return f"runs on the CPU, not on {spec.device}"
    if spec.num_heads % spec.num_kv_heads:
        return f"{spec.num_heads} query heads are no multiple of {spec.num_kv_heads} kv heads"
    if KV_TILE % spec.block_size:
        return f"block size {spec.block_size} does not divide {KV_TILE}"
    if spec.kv.dtype not in TORCH_KV_DTYPES:
        return f"KV dtype {spec.kv.dtype} is unknown"
    return None


ATTENTION_CANDIDATES: tuple[AttentionImplementation, ...] = (
    Implementation("reference.paged", _supports_reference, ReferenceAttention),
)


def choose_attention(spec: AttnSpec) -> Choice[AttnSpec, PrepareAttention]:
    """Return the implementation for an attention layer; see `select.choose`."""
    return choose(spec, ATTENTION_CANDIDATES)
