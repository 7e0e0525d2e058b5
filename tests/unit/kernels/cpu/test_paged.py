"""The C++ ops over the paged cache, for every instruction set, against the references."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from qinfer.errors import ConfigError
from qinfer.kernels.cpu import native, paged
from qinfer.kernels.cpu.program import Int8Buffer, Program
from qinfer.kernels.reference import dequantize_kv, isolate_broken, quantize_kv, rms_norm, rotate
from qinfer.kernels.spec import PagedKV
from qinfer.kvcache.layout import KVLayout
from qinfer.kvcache.pool import KVPool
from qinfer.schemes import KV_SCHEMES, KVScheme

SPAN = 256
pytestmark = pytest.mark.skipif(native.load() is None, reason="the C++ library was not built")


@dataclass(frozen=True)
class Heads:
    """Sizes of a layer; the window is None or a number of tokens."""

    num: int = 6
    num_kv: int = 2
    dim: int = 16
    block_size: int = 16
    window: int | None = None


@dataclass(frozen=True)
class History:
    """A sequence whose last `num_queries` tokens are in the step."""

    q: torch.Tensor  # [length, heads, dim]
    k: torch.Tensor  # [length, kv_heads, dim]
    v: torch.Tensor

    @property
    def length(self) -> int:
        return self.k.shape[0]


def sequence(heads: Heads, length: int, seed: int = 0) -> History:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    sizes = (heads.num, heads.num_kv, heads.num_kv)
    return History(*(torch.randn(length, n, heads.dim, generator=generator) for n in sizes))


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


class Cache:
    """Pages that hold some sequences in scattered blocks, and NaN wherever nothing is stored."""

    def __init__(self, heads: Heads, scheme: KVScheme, sequences: Sequence[History]) -> None:
        self.heads, self.scheme, self.sequences = heads, scheme, sequences
        self.layout = KVLayout(1, heads.num_kv, heads.dim, scheme, heads.block_size)
        blocks = [self.layout.num_blocks(s.length) for s in sequences]
        self.width = max(blocks) + 1
        pool = KVPool(self.layout, sum(blocks) + 3)
        self.pages = pool.layer(0)
        order = torch.randperm(pool.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.table = torch.zeros(len(sequences), self.width, dtype=torch.int64)
        for row, count in enumerate(blocks):
            self.table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        poison(self.pages)

    def slots(self, row: int, begin: int, end: int) -> torch.Tensor:
        positions = torch.arange(begin, end)
        size = self.heads.block_size
        return self.table[row, positions // size] * size + positions % size

    def index(self, queries: Sequence[tuple[int, int, int]]) -> paged.StepIndex:
        """Return the index of a step of `(row, begin, end)` positions of sequences."""
        counts = [end - begin for _, begin, end in queries]
        slots = [self.slots(row, begin, end) for row, begin, end in queries]
        return paged.StepIndex(
            positions=torch.cat([torch.arange(begin, end) for _, begin, end in queries]),
            slots=torch.cat(slots),
            block_tables=self.table[[row for row, _, _ in queries]].contiguous(),
            seq_lens=int64(*(end for _, _, end in queries)),
            query_starts=int64(0, *torch.tensor(counts).cumsum(0).tolist()),
            num_tokens=int64(sum(counts)),
            num_sequences=int64(len(queries)),
            table_width=int64(self.width),
        )

    def qkv(self, queries: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        parts = [
            torch.cat([x[begin:end] for x in (s.q, s.k, s.v)], dim=1)
            for row, begin, end in queries
            for s in (self.sequences[row],)
        ]
        return torch.cat(parts).flatten(1).contiguous()

    def step(
        self,
        queries: Sequence[tuple[int, int, int]],
        threads: int = 1,
        output: paged.AttentionOutput | None = None,
    ) -> torch.Tensor:
        """Store and attend for `(row, begin, end)` positions; returns `[tokens, heads * dim]`."""
        heads, qkv, index = self.heads, self.qkv(queries), self.index(queries)
        still = torch.ones(self.width * heads.block_size, heads.dim // 2)
        output = output or self.output(qkv.shape[0], threads)
        program = Program()
        rotation = paged.Rotation(still, torch.zeros_like(still))
        paged.rope_store(program, qkv, rotation, self.pages, self.scheme, index)
        paged.attention(program, qkv, output, self.pages, self.scheme, index, heads.window)
        program.run(threads)
        return output.out

    def output(self, num_tokens: int, threads: int) -> paged.AttentionOutput:
        heads = self.heads
        context = self.width * heads.block_size
        floats = paged.scratch_floats(threads, context, heads.num, heads.num_kv, heads.dim)
        scratch = torch.full((floats,), torch.nan)
        return paged.AttentionOutput(torch.zeros(num_tokens, heads.num * heads.dim), scratch)

    def dense(self, row: int, begin: int) -> torch.Tensor:
        """Return literal softmax attention in float64 of the tokens from `begin` on."""
        s, group = self.sequences[row], self.heads.num // self.heads.num_kv
        seen = (dequantize_kv(*quantize_kv(x, self.scheme)).double() for x in (s.k, s.v))
        k, v = (x.repeat_interleave(group, dim=1) for x in seen)
        scores = torch.einsum("qhd,khd->hqk", s.q[begin:].double(), k) / math.sqrt(self.heads.dim)
        query, key = torch.arange(begin, s.length)[:, None], torch.arange(s.length)
        hidden = key > query
        if self.heads.window is not None:
            hidden |= key <= query - self.heads.window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def poison(pages: PagedKV) -> None:
    """Fill pages with what a dead sequence may have left: NaN where there can be one."""
    for tensor in (pages.k, pages.v, pages.k_scales, pages.v_scales):
        if tensor is not None:
            tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 127)


def attend(heads: Heads, kv: str, length: int, num_queries: int, threads: int = 1) -> float:
    """Return the largest error of the last queries of one sequence, stored in one step before."""
    cache = Cache(heads, KV_SCHEMES[kv], [sequence(heads, length)])
    first = length - num_queries
    if first:
        cache.step([(0, 0, first)])
    ours = cache.step([(0, first, length)], threads)
    return (ours - cache.dense(0, first)).abs().max().item()


def tolerance(isa: str, kv: str) -> float:
    """Return the error allowed: float32's, or that of the 15-bit queries over INT8 pages."""
    return 2e-4 if (isa, kv) == ("avx512", "int8") else 5e-6


@pytest.mark.parametrize("kv", KV_SCHEMES)
@pytest.mark.parametrize("head_dim", [16, 36, 64, 80, 96, 100, 128, 256])
def test_k11_every_head_size_and_cache_type(isa: str, head_dim: int, kv: str) -> None:
    assert attend(Heads(dim=head_dim), kv, 77, 21) < tolerance(isa, kv)


@pytest.mark.parametrize("kv", ["int8", "fp16"])
@pytest.mark.parametrize("length", [1, 16, 17, SPAN, SPAN + 1, 2 * SPAN + 40])
@pytest.mark.parametrize("num_queries", [1, 16, 50])
@pytest.mark.parametrize("window", [None, 1, 20, 300])
def test_lengths_chunks_and_windows(
    isa: str, kv: str, length: int, num_queries: int, window: int | None
) -> None:
    error = attend(Heads(window=window), kv, length, min(num_queries, length), 2)
    assert error < tolerance(isa, kv)


@pytest.mark.parametrize("kv", ["int8", "fp32"])
@pytest.mark.parametrize(("num", "num_kv"), [(1, 1), (9, 3), (8, 1), (3, 3), (71, 1)])
@pytest.mark.parametrize("block_size", [1, 8, 48])
def test_head_groups_and_block_sizes(
    isa: str, kv: str, num: int, num_kv: int, block_size: int
) -> None:
    heads = Heads(num=num, num_kv=num_kv, block_size=block_size)
    assert attend(heads, kv, 300, 3) < tolerance(isa, kv)


@pytest.mark.parametrize("kv", KV_SCHEMES)
@pytest.mark.parametrize("window", [None, 270])
def test_bits_depend_neither_on_chunks_nor_batch_nor_threads(
    isa: str, kv: str, window: int | None
) -> None:
    heads = Heads(num=9, num_kv=3, dim=36, window=window)
    sequences = [sequence(heads, length, seed) for seed, length in enumerate((570, 5, 300))]
    cache = Cache(heads, KV_SCHEMES[kv], sequences)
    expected = [cache.step([(row, 0, s.length)]) for row, s in enumerate(sequences)]

    for threads in (2, 3, 7):
        everything = [(row, 0, s.length) for row, s in enumerate(sequences)]
        assert torch.equal(cache.step(everything, threads), torch.cat(expected))

    chunks = [cache.step([(0, begin, min(begin + 100, 570))], 2) for begin in range(0, 570, 100)]
    assert torch.equal(torch.cat(chunks), expected[0])

    for position in (0, 4, 255, 256, 299):
        for threads in (1, 2, 3, 16):
            rows = [row for row, s in enumerate(sequences) if s.length > position]
            tokens = [(row, position, position + 1) for row in rows]
            one_each = torch.stack([expected[row][position] for row in rows])
            assert torch.equal(cache.step(tokens, threads), one_each)
            alone = cache.step([(0, position, position + 1)], threads)
            assert torch.equal(alone[0], expected[0][position])


@pytest.mark.parametrize("kv", KV_SCHEMES)
def test_every_number_of_sequences_decodes_to_the_same_bits(isa: str, kv: str) -> None:
    heads = Heads(num=2, num_kv=1)
    lengths = [1 + 7 * row % 40 for row in range(255)] + [SPAN, SPAN + 9]
    sequences = [sequence(heads, length, row) for row, length in enumerate(reversed(lengths))]
    cache = Cache(heads, KV_SCHEMES[kv], sequences)
    cache.step([(row, 0, s.length) for row, s in enumerate(sequences)], 2)
    last = [(row, s.length - 1, s.length) for row, s in enumerate(sequences)]
    whole = cache.step(last)
    for number in (1, 2, 5, 8, 33, 257):
        assert torch.equal(cache.step(last[:number], 1 + number % 3), whole[:number])
    dense = torch.cat([cache.dense(row, begin) for row, begin, _ in last])
    assert (whole - dense).abs().max() < tolerance(isa, kv)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_merge_quantizes_the_rows_as_the_quantize_op_does(
    isa: str, threads: int, permuted: bool
) -> None:
    heads = Heads(num=3, num_kv=1, dim=36, block_size=16)  # 108 columns, the last group short
    cache = Cache(heads, KV_SCHEMES["int8"], [sequence(heads, 600)])
    cache.step([(0, 0, 590)])
    permutation = torch.randperm(108, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    order = permutation if permuted else None
    plain = cache.output(10, threads)
    ours = Int8Buffer(10, 108)
    output = paged.AttentionOutput(plain.out, plain.scratch, ours, order)
    out = cache.step([(0, 590, 600)], threads, output)
    expected = Int8Buffer(10, 108)
    program = Program()
    program.quantize(out, int64(10), expected, permutation=order)
    program.run(1)
    assert torch.equal(ours.codes, expected.codes)
    assert torch.equal(ours.scales, expected.scales)
    assert torch.equal(ours.sums, expected.sums)


@pytest.mark.parametrize("kv", KV_SCHEMES)
def test_a_poisoned_sequence_is_nan_and_its_mates_are_not(isa: str, kv: str) -> None:
    heads = Heads()
    sequences = [sequence(heads, length) for length in (40, 50)]
    clean = Cache(heads, KV_SCHEMES[kv], sequences).step([(0, 0, 40), (1, 0, 50)])
    for part in ("q", "k", "v"):
        poisoned = [sequence(heads, length) for length in (40, 50)]
        {"q": poisoned[0].q, "k": poisoned[0].k, "v": poisoned[0].v}[part][5] = torch.nan
        out = Cache(heads, KV_SCHEMES[kv], poisoned).step([(0, 0, 40), (1, 0, 50)], 2)
        assert out[5].isnan().all()
        assert torch.equal(out[40:], clean[40:])


def extremes(dim: int) -> torch.Tensor:
    """Return vectors `[tokens, 1, dim]` that strain the formula of the codes."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, dim, generator=generator)
    x *= torch.logspace(-44, 38, 64, dtype=torch.float64)[:, None].clamp(1e-45, 3e37).float()
    x[0], x[1, 1:], x[2] = 0.0, 0.0, -0.0
    x[3, 0], x[4, 0], x[5, 0] = torch.nan, torch.inf, -torch.inf
    halves = torch.arange(dim) + 0.5
    x[6], x[7], x[8] = halves, -halves, halves / 64
    x[6, 0] = x[7, 0] = 127.0
    x[9] = torch.logspace(-6, 1, dim) * 448 / 10  # down to the subnormals of e4m3
    return x[:, None]


@pytest.mark.parametrize("kv", KV_SCHEMES)
@pytest.mark.parametrize("head_dim", [36, 64])
def test_k02_codes_equal_the_reference_to_the_bit(isa: str, head_dim: int, kv: str) -> None:
    x = extremes(head_dim)
    scheme = KV_SCHEMES[kv]
    tokens = x.shape[0]
    heads = Heads(num=1, num_kv=1, dim=head_dim)
    cache = Cache(heads, scheme, [History(x, x, x.flip(0))])
    cache.step([(0, 0, tokens)], threads=3)
    slots = cache.slots(0, 0, tokens)
    pages = cache.pages
    still = torch.ones(1, 1, head_dim // 2)
    k, v = isolate_broken(rotate(x, still, torch.zeros_like(still)), x.flip(0), scheme)
    for stored, scales, values in (
        (pages.k, pages.k_scales, k),
        (pages.v, pages.v_scales, v),
    ):
        codes, expected_scales = quantize_kv(values, scheme)
        ours = stored.flatten(0, 1)[slots]
        assert torch.equal(bits(ours), bits(codes))
        if scales is not None and expected_scales is not None:
            assert torch.equal(bits(scales.flatten(0, 1)[slots]), bits(expected_scales))


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of numbers; all NaN are one."""
    if x.dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("head_dim", [16, 36, 128])
def test_rotation_and_norm(isa: str, head_dim: int, norm: bool) -> None:
    heads = Heads(num=4, num_kv=2, dim=head_dim)
    cache = Cache(heads, KV_SCHEMES["fp32"], [sequence(heads, 40)])
    generator = torch.Generator().manual_seed(2)
    angles = torch.rand(200, head_dim // 2, generator=generator) * 6
    weights = torch.rand(2, head_dim, generator=generator) + 0.5
    queries = [(0, 0, 40)]
    index, qkv = cache.index(queries), cache.qkv(queries)
    index.positions.add_(130)
    q_norm, k_norm = (weights[0], weights[1]) if norm else (None, None)
    before = qkv.clone()
    program = Program()
    rotation = paged.Rotation(angles.cos(), angles.sin(), q_norm, k_norm, 1e-5)
    paged.rope_store(program, qkv, rotation, cache.pages, KV_SCHEMES["fp32"], index)
    program.run(2)
    q, k, v = before.view(40, 8, head_dim).split([4, 2, 2], dim=1)
    if norm:
        q, k = rms_norm(q, weights[0], 1e-5), rms_norm(k, weights[1], 1e-5)
    tables = (angles.cos()[index.positions][:, None], angles.sin()[index.positions][:, None])
    q, k = rotate(q, *tables), rotate(k, *tables)
    ours = (
        qkv.view(40, 8, head_dim)[:, :4],
        cache.pages.k.flatten(0, 1)[index.slots],
        cache.pages.v.flatten(0, 1)[index.slots],
    )
    for x, expected in zip(ours, (q, k, v), strict=True):
        assert (x - expected).abs().max() < 2e-6 if norm else torch.equal(x, expected)


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    heads = Heads()
    cache = Cache(heads, KV_SCHEMES["int8"], [sequence(heads, 5)])
    output = cache.output(5, 1)
    qkv, index = cache.qkv([(0, 0, 5)]), cache.index([(0, 0, 5)])
    with pytest.raises(ConfigError, match="do not hold fp16 elements"):
        paged.attention(Program(), qkv, output, cache.pages, KV_SCHEMES["fp16"], index)
    with pytest.raises(ConfigError, match="140 columns"):
        paged.attention(Program(), qkv[:, :140], output, cache.pages, cache.scheme, index)
    assert paged.unsupported_reason(5, 2, 64) is not None
    assert paged.unsupported_reason(4, 2, 1024) is not None
    assert paged.unsupported_reason(4, 2, 100) is None
