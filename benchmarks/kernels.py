"""Speed of the linear op alone, against peaks of the machine that the same run measures.

    python benchmarks/kernels.py --shapes smollm2 --rows 1 8 512

The weights of a case are copies of a model's linears, so many that they do not fit the caches
where `rows` is small. Kernels and peaks alternate, so that a busy machine slows both; best and
median of the rounds. With one thread the clock counts that thread's own time, which neighbours on
the machine disturb least.

Gop/s counts two operations per weight and row, against `vpdpbusd` (int8) or FMA (exact) on
registers only; GB/s counts the weights read once, against plain reads of as many bytes.
"""

import argparse
import ctypes
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from qinfer.formats.weight import QuantizedWeight
from qinfer.kernels.cpu import native, tiled
from qinfer.kernels.cpu.arena import Arena
from qinfer.kernels.cpu.program import Int8Buffer, Program
from qinfer.schemes import WeightScheme

# Rows and columns of a decoder block's fused linears.
SHAPES = {
    "smollm2": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
    "llama-1.1b": ((2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632)),
}
DENSE = {"bf16": torch.bfloat16, "fp32": torch.float32}
WEIGHTS = ("int4", "int8", *DENSE)
FEW_ROWS = 16  # up to here memory is the limit, so the weights must come from there
PEAK_ROUNDS = 200_000


class Peaks:
    """The functions of peaks.c, on as many threads as the kernels get."""

    def __init__(self, threads: int) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise SystemExit("measuring the peaks needs a C compiler")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "peaks.so"
            source = Path(__file__).with_name("peaks.c")
            options = ["-O2", "-march=native", "-shared", "-fPIC", "-o", str(library)]
            subprocess.run([compiler, *options, str(source)], check=True)
            self.handle = ctypes.CDLL(str(library))
        self.arithmetic_functions = {
            "exact": self.handle.peak_fma,
            "int8": self.handle.peak_int8,
        }
        for function in self.arithmetic_functions.values():
            function.argtypes = (ctypes.c_int64,)
            function.restype = ctypes.c_double
        self.handle.read_all.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def _seconds(self, call: Callable[[int], object]) -> float:
        def measure() -> None:
            others = (
                [self.pool.submit(call, i) for i in range(1, self.threads)] if self.pool else []
            )
            call(0)
            for other in others:
                other.result()

        return seconds(measure, self.threads)

    def arithmetic(self, mode: str) -> float:
        """Return operations per second."""
        function = self.arithmetic_functions[mode]
        operations = function(1) * PEAK_ROUNDS * self.threads
        return operations / self._seconds(lambda _: function(PEAK_ROUNDS))

    def read(self, address: int, num_bytes: int) -> float:
        """Return bytes per second."""
        part = num_bytes // self.threads // 256 * 256
        elapsed = self._seconds(lambda i: self.handle.read_all(address + i * part, part))
        return part * self.threads / elapsed


def seconds(call: Callable[[], object], threads: int) -> float:
    clock = time.thread_time if threads == 1 else time.perf_counter
    start = clock()
    call()
    return clock() - start


@dataclass
class Case:
    """A model's linears, recorded as one program."""

    name: str
    rows: int
    mode: tiled.Activations
    threads: int
    program: Program = field(default_factory=Program)
    weights: int = 0
    weight_bytes: int = 0
    address: int = 0

    def seconds(self) -> float:
        return seconds(lambda: self.program.run(self.threads), self.threads)


def random_weight(
    shape: tuple[int, int], args: argparse.Namespace
) -> torch.Tensor | QuantizedWeight:
    if args.weights in DENSE:
        return torch.randn(shape).to(DENSE[args.weights])
    bits = int(args.weights.removeprefix("int"))
    scheme = WeightScheme(bits, args.group_size or None, symmetric=not args.asym)
    half, groups = 1 << (bits - 1), scheme.num_groups(shape[1])
    codes = torch.randint(-half, half, shape, dtype=torch.int8)
    zeros = torch.randint(-half, half, (shape[0], groups)).short() if args.asym else None
    return QuantizedWeight(codes, torch.rand(shape[0], groups).half(), scheme, zeros)


def make_case(args: argparse.Namespace, rows: int) -> Case:
    shapes = SHAPES[args.shapes]
    samples = [tiled.tile(random_weight(shape, args)) for shape in shapes]
    block_bytes = sum(sample.nbytes for sample in samples)
    copies = -(-(args.megabytes << 20) // block_bytes) if rows <= FEW_ROWS else 1
    arena = Arena(copies * (block_bytes + 4096))
    mode: tiled.Activations = "exact" if args.exact or args.weights in DENSE else "int8"
    case = Case(f"{args.weights} {args.shapes}", rows, mode, args.threads)
    num_tokens = torch.tensor([rows])
    for copy in range(copies * len(shapes)):
        weight = placed(samples[copy % len(shapes)], arena)
        case.address = case.address or weight.data.data_ptr()
        x: torch.Tensor | Int8Buffer = torch.randn(rows, weight.in_features)
        if mode == "int8":
            x = quantized(x, num_tokens)
        out = torch.empty(rows, weight.out_features)
        tiled.add_linear(case.program, weight, x, out, num_tokens)
        case.weights += weight.in_features * weight.out_features
        case.weight_bytes += weight.nbytes
    return case


def placed(weight: tiled.TiledWeight, arena: Arena) -> tiled.TiledWeight:
    """Return a copy of a weight in the arena."""

    def copy(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else arena.take(part.shape, part.dtype).copy_(part)

    data = arena.take(weight.data.shape, torch.uint8).copy_(weight.data)
    return tiled.TiledWeight(
        data=data,
        scales=copy(weight.scales),
        zeros=copy(weight.zeros),
        permutation=None,
        kind=weight.kind,
        out_features=weight.out_features,
        in_features=weight.in_features,
        group_size=weight.group_size,
    )


def quantized(x: torch.Tensor, num_tokens: torch.Tensor) -> Int8Buffer:
    rows, program = Int8Buffer(x.shape[0], x.shape[1]), Program()
    program.quantize(x, num_tokens, rows)
    program.run(1)
    return rows


def measure(case: Case, peaks: Peaks, rounds: int) -> str:
    times, arithmetic, reads = [], [], []
    for _ in range(rounds):
        times.append(case.seconds())
        arithmetic.append(peaks.arithmetic(case.mode))
        if case.rows <= FEW_ROWS:
            reads.append(peaks.read(case.address, case.weight_bytes))
    operations = 2 * case.weights * case.rows
    best, median = min(times), statistics.median(times)
    peak = max(arithmetic)
    line = (
        f"{case.name} {case.mode}, {case.rows:4d} rows: {1e3 * best:8.3f} ms "
        f"(median {1e3 * median:8.3f}) {operations / best / 1e9:6.0f} Gop/s = "
        f"{100 * operations / best / peak:3.0f} % of {peak / 1e9:.0f}"
    )
    if reads:
        read = max(reads)
        line += (
            f", {case.weight_bytes / best / 1e9:5.1f} GB/s = "
            f"{100 * case.weight_bytes / best / read:3.0f} % of {read / 1e9:.1f}"
        )
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=list(SHAPES), default="smollm2")
    parser.add_argument("--weights", choices=WEIGHTS, default="int4")
    parser.add_argument("--group-size", type=int, default=64, help="0: per channel")
    parser.add_argument("--asym", action="store_true")
    parser.add_argument("--exact", action="store_true", help="float activations")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 128, 512])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=200, help="weights, where rows are few")
    parser.add_argument("--isa", help="portable, avx2 or avx512; default: the best there is")
    args = parser.parse_args()
    library = native.load()
    if library is None or (args.isa and not library.use_isa(args.isa)):
        parser.error("the C++ kernels or this instruction set are not available")
    torch.manual_seed(0)
    peaks = Peaks(args.threads)
    print(f"{library.isa}, {args.threads} threads; best and median of {args.rounds} rounds")
    for rows in args.rows:
        print(measure(make_case(args, rows), peaks, args.rounds), flush=True)


if __name__ == "__main__":
    main()
