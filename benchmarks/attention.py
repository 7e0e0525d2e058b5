"""Speed of the attention ops alone, INT8 against fp16 pages.

    python benchmarks/attention.py --heads 9 --kv-heads 3 --head-dim 64 --layers 30

Every layer has its own pages, so what a step reads is what a model's step would read. The page
types alternate, so that a busy machine slows both. Times are for all layers; GB/s counts the pages
read once, Gop/s two operations per multiplication that causality leaves.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from peaks import seconds

from qinfer.kernels.cpu import native, paged
from qinfer.kernels.cpu.program import Program
from qinfer.kvcache.layout import KVLayout
from qinfer.kvcache.pool import KVPool
from qinfer.schemes import KV_SCHEMES


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """A step's sequences, the tokens of each in it, and their tokens in the cache after it."""

    sequences: int
    tokens: int
    length: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.sequences} x {self.tokens} at {self.length}"


LOADS = tuple(
    Load(*load)
    for load in (
        (1, 1, 128),
        (1, 1, 1024),
        (8, 1, 1024),
        (8, 1, 4096),
        (1, 512, 512),
        (1, 512, 1536),
    )
)

# Short steps are repeated within a program until this much is read: on a busy machine a thread may
# wait long for its core when a program starts.
PASS_BYTES = 1 << 28


class Case:
    """One load on one type of pages, recorded as a program."""

    def __init__(self, model: Heads, kv: str, load: Load, threads: int) -> None:
        sequences, tokens, length = load.sequences, load.tokens, load.length
        scheme = KV_SCHEMES[kv]
        self.layout = KVLayout(model.layers, model.kv_heads, model.head_dim, scheme)
        blocks = self.layout.num_blocks(length)
        pool = KVPool(self.layout, sequences * blocks)
        rows = sequences * tokens
        qkv = torch.randn(rows, (model.heads + 2 * model.kv_heads) * model.head_dim)
        index = paged.StepIndex(
            positions=torch.arange(length - tokens, length).repeat(sequences),
            slots=torch.zeros(rows, dtype=torch.int64),
            block_tables=torch.randperm(sequences * blocks).view(sequences, blocks),
            seq_lens=torch.full((sequences,), length),
            query_starts=torch.arange(sequences + 1) * tokens,
            num_tokens=torch.tensor([rows]),
            num_sequences=torch.tensor([sequences]),
            table_width=torch.tensor([blocks]),
        )
        sizes = (model.heads, model.kv_heads, model.head_dim)
        scratch = torch.empty(paged.scratch_floats(threads, length, *sizes))
        output = paged.AttentionOutput(torch.empty(rows, model.heads * model.head_dim), scratch)
        self.program = Program()
        self.bytes = sequences * length * self.layout.bytes_per_token
        self.passes = max(1, PASS_BYTES // (self.bytes * tokens))
        for layer in range(model.layers):
            cache = pool.layer(layer)
            for tensor in (cache.k, cache.v):
                tensor.copy_(torch.randint(-127, 128, tensor.shape, dtype=torch.int8))
            for scales in (cache.k_scales, cache.v_scales):
                if scales is not None:
                    scales.fill_(0.01)
        for layer in range(model.layers * self.passes):
            cache = pool.layer(layer % model.layers)
            paged.attention(self.program, qkv, output, cache, scheme, index, model.window)
        self.tokens = rows
        seen = sum(range(length - tokens + 1, length + 1)) * sequences
        self.operations = 4 * seen * model.heads * model.head_dim * model.layers

    def seconds(self, threads: int) -> float:
        """Run all layers once, on no more threads than it was made for."""
        return seconds(lambda: self.program.run(threads), threads) / self.passes


def measure(args: argparse.Namespace, load: Load) -> Iterator[str]:
    """Yield one line per page type."""
    model = Heads(args.heads, args.kv_heads, args.head_dim, args.layers, args.window)
    cases = {kv: Case(model, kv, load, args.threads) for kv in args.kv}
    times: dict[str, list[float]] = {kv: [] for kv in cases}
    for _ in range(args.rounds):
        for kv, case in cases.items():
            times[kv].append(case.seconds(args.threads))
    for kv, case in cases.items():
        best, median = min(times[kv]), statistics.median(times[kv])
        yield (
            f"{load.name:16s}  {kv:9s} {1e3 * best:9.3f} ms "
            f"(median {1e3 * median:9.3f})  {case.tokens / best:8.0f} tok/s "
            f"{case.bytes / best / 1e9:6.1f} GB/s {case.operations / best / 1e9:6.0f} Gop/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--window", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kv", nargs="+", default=["int8", "fp16"], choices=list(KV_SCHEMES))
    parser.add_argument("--isa", help="portable, avx2 or avx512; default: the best there is")
    parser.add_argument("--loads", nargs="+", type=int, default=range(len(LOADS)))
    args = parser.parse_args()
    library = native.load()
    if library is None or (args.isa and not library.use_isa(args.isa)):
        parser.error("the C++ kernels or this instruction set are not available")
    print(f"{library.isa}, {args.threads} threads, {args.heads}/{args.kv_heads} heads of "
          f"{args.head_dim}, {args.layers} layers")  # fmt: skip
    for number in args.loads:
        for line in measure(args, LOADS[number]):
            print(line, flush=True)


if __name__ == "__main__":
    main()
