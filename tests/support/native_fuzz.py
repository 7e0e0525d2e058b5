"""Calls every entry point of the C++ library with arguments that make no sense, or nearly do.

A process of its own, as a crash is what it looks for:

    python -m support.native_fuzz LIBRARY EXAMPLES

Every pointer leads to far more memory than any of the sizes here can need, or nowhere, or between
two elements; every size is small, zero or negative. So whatever the library does not refuse it may
run: it must return a status either way, and refuse what lacks a pointer that it needs. Each call is
written to stdout before it is made.
"""

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qinfer.kernels.cpu.faults import FaultsArgs
from qinfer.kernels.cpu.gram import GramArgs
from qinfer.kernels.cpu.native import WeightArgs
from qinfer.kernels.cpu.paged import AttentionArgs, RopeStoreArgs
from qinfer.kernels.cpu.program import (
    ArgmaxArgs,
    EmbedArgs,
    GatherArgs,
    Int8Rows,
    NormArgs,
    OpArgs,
    OpKind,
    QuantizeArgs,
    SiluMulArgs,
)
from qinfer.kernels.cpu.sampling import DrawArgs, SampleArgs
from qinfer.kernels.cpu.tiled import LinearArgs

STATUSES = (0, 1, 2)
BAD_ARGUMENT = 1
ZEROS = torch.zeros(40 << 20, dtype=torch.uint8)  # what pointers lead to: as indices, the first
OUTPUT = torch.zeros(40 << 20, dtype=torch.uint8)  # what is written to, and never read as indices
COUNT = torch.zeros(1, dtype=torch.int64)
LENGTHS = torch.tensor([2, 2])
STARTS = torch.tensor([0, 2, 4])
DRAWS = (DrawArgs * 4)()
for draw in DRAWS:
    draw.logits, draw.top_p, draw.log_min_p = ZEROS.data_ptr(), 1.0, float("-inf")

SIZES = st.sampled_from([0, 1, 2, 3, 8, 16, 31, 32, 33, 48, 64, -1, -32, -(2**31)])
CHOICES = st.integers(-1, 6)  # kinds, types and flags
CHOSEN = {"kind", "dtype", "scale_dtype", "bits", "tiled", "upper"}
FLOATS = st.sampled_from([0.0, 1e-5, 1.0, float("nan"), -1.0])
# What a field holds that is not spoiled; 64 if it is not here.
GOOD = {
    "kind": [0, 1, 2, 3],
    "dtype": [0, 1],
    "scale_dtype": [0, 2],
    "tiled": [0, 1],
    "bits": [4, 8],
    "size": [40, 64],
    "hidden": [40, 64],
    "out_features": [16, 50],
    "group_size": [32, 64],
    "num_groups": [2, 3],
    "float_columns": [40, 64],
    "out_stride": [50, 64],
    "workers": [1, 2],
    "row_begin": [0, 5],
    "row_end": [5, 16],
    "threads": [1, 3],
    "head_dim": [16, 64],
    "num_kv_heads": [2],
    "num_heads": [4, 6],
    "block_size": [1, 16],
    "sliding_window": [0, 1, 5],
    "tokens": [1, 5, 64],
    "columns": [17, 64],
    "stride": [64, 70],
    "upper": [0, 1],
}
WRITTEN = (
    *(
        "qkv",
        "out",
        "groups",
        "k",
        "v",
        "k_scales",
        "v_scales",
        "tiles",
        "scratch",
        "packed",
        "sums",
    ),
    *("bad_layers", "token_notes", "row_notes"),
)
POINTERS = dict.fromkeys(WRITTEN, OUTPUT.data_ptr()) | {
    "num_tokens": COUNT.data_ptr(),
    "num_rows": COUNT.data_ptr(),
    "num_draws": COUNT.data_ptr(),
    "num_sequences": COUNT.data_ptr(),
    "table_width": LENGTHS.data_ptr(),
    "seq_lens": LENGTHS.data_ptr(),
    "query_starts": STARTS.data_ptr(),
    "draws": ctypes.addressof(DRAWS),
}


@dataclass(frozen=True)
class Op:
    """An op's struct, and which of its pointers may be absent or must be."""

    args: type[ctypes.Structure]
    optional: frozenset[str] = frozenset()
    absent: Sequence[Sequence[str]] = ((),)  # pointers that exclude others: one of these


OPS = {
    OpKind.LINEAR: Op(
        LinearArgs,
        # Whether the scales must be there depends on the kind.
        frozenset({"permutation", "bias", "residual", "scales", "zeros", "offsets"}),
        absent=tuple(product(("float_rows", "int8_rows"), ("zeros", "offsets"))),
    ),
    OpKind.LINEAR_BF16: Op(
        LinearArgs,
        frozenset({"bias", "residual", "scales", "zeros", "offsets"}),
        absent=(("int8_rows", "permutation"),),
    ),
    OpKind.EMBED: Op(EmbedArgs),
    OpKind.NORM: Op(NormArgs, frozenset({"out", "int8_rows", "permutation", "bad_layers"})),
    OpKind.SILU_MUL: Op(SiluMulArgs, frozenset({"out", "int8_rows", "permutation"})),
    OpKind.QUANTIZE: Op(QuantizeArgs, frozenset({"permutation"})),
    OpKind.GATHER: Op(GatherArgs),
    OpKind.ROPE_STORE: Op(RopeStoreArgs, frozenset({"q_norm", "k_norm", "k_scales", "v_scales"})),
    OpKind.ATTENTION: Op(
        AttentionArgs, frozenset({"int8_rows", "permutation", "k_scales", "v_scales"})
    ),
    OpKind.MERGE: Op(
        AttentionArgs, frozenset({"int8_rows", "permutation", "k_scales", "v_scales"})
    ),
    OpKind.ARGMAX: Op(ArgmaxArgs),
    OpKind.SAMPLE: Op(SampleArgs),
    OpKind.FAULTS: Op(FaultsArgs),
}


class Filler:
    """Fills structs with drawn values, most of them good; remembers what is missing.

    Args:
        data: where values are drawn from.
        optional: pointers that may be absent.
        absent: pointers that are, as they exclude others.
    """

    def __init__(
        self, data: st.DataObject, optional: frozenset[str], absent: frozenset[str] = frozenset()
    ) -> None:
        self._data = data
        self._optional = optional
        self._absent = absent
        self._kept: list[ctypes.Structure] = []
        self._spoiled = data.draw(st.sets(st.integers(0, 24), max_size=2))
        self._count = 0
        self.missing = False
        self.values: dict[str, object] = {}

    def fill(self, args: ctypes.Structure) -> None:
        """Give every field of a struct a value."""
        for name, kind in args._fields_:  # type: ignore[misc] # a field may be a pair or a triple
            if issubclass(kind, ctypes.Structure):
                self.fill(getattr(args, name))
            elif kind is ctypes.c_void_p:
                setattr(args, name, self.pointer(name))
            elif kind in {ctypes.c_float, ctypes.c_double}:
                setattr(args, name, self._data.draw(FLOATS))
            else:
                setattr(args, name, self.integer(name))

    def integer(self, name: str) -> int:
        """Return a value for a field or an argument of this name."""
        good, bad = st.sampled_from(GOOD.get(name, [64])), CHOICES if name in CHOSEN else SIZES
        value: int = self._data.draw(bad if self._spoils() else good)
        self.values[name] = value
        return value

    def pointer(self, name: str) -> int | None:
        """Return an address; spoiled, 0 or not a multiple of an element."""
        shift = self._data.draw(st.sampled_from([None, 1, 4])) if self._spoils() else 0
        if name in self._absent:
            return None
        self.values[name] = shift
        if shift is None:
            self.missing |= name not in self._optional
            return None
        if name == "int8_rows":
            rows = Int8Rows()
            self._kept.append(rows)
            self.fill(rows)
            return ctypes.addressof(rows) + shift
        return POINTERS.get(name, ZEROS.data_ptr()) + shift

    def _spoils(self) -> bool:
        """Tell whether the next value is to be spoiled."""
        self._count += 1
        return self._count - 1 in self._spoiled


def fuzz_op(library: ctypes.CDLL, kind: OpKind, isa: str) -> Callable[[st.DataObject], None]:
    """Return a property of an op: a status, whatever its arguments are."""

    def check(data: st.DataObject) -> None:
        op = OPS[kind]
        absent = data.draw(st.sampled_from(op.absent))
        args, filler = op.args(), Filler(data, op.optional, frozenset(absent))
        filler.fill(args)
        # Of sequences there are two.
        highest = 2 if kind in {OpKind.ATTENTION, OpKind.MERGE} else 4
        COUNT[0] = data.draw(st.sampled_from([-3, 0, 1, 2, highest]))
        threads = data.draw(st.sampled_from([1, 1, 1, 1, 2, 2, 2, 3, 0, -1, 1025, 2**31 - 1]))
        known = data.draw(st.sampled_from([kind] * 12 + [0, -1, 99, 2**31 - 1]))
        ops = (OpArgs * 1)(OpArgs(known, 0, ctypes.addressof(args)))
        say(f"{isa} {kind.name} as {known} count {int(COUNT[0])} threads {threads}", filler.values)
        status = library.qinfer_run(ops, ctypes.c_int64(1), ctypes.c_int32(threads))
        assert status in STATUSES
        if filler.missing or known != kind or not 1 <= threads <= 1024:
            assert status == BAD_ARGUMENT

    return check


def fuzz_dequantize(library: ctypes.CDLL, data: st.DataObject) -> None:
    """Dequantize a weight that may be none."""
    absent = frozenset({data.draw(st.sampled_from(["zeros", "offsets"]))})
    optional = frozenset({"zeros", "offsets", "group_index"})
    weight, filler = WeightArgs(), Filler(data, optional, absent)
    filler.fill(weight)
    names = ("dtype", "row_begin", "row_end", "threads")
    dtype, begin, end, threads = (filler.integer(name) for name in names)
    out, there = filler.pointer("out"), data.draw(st.sampled_from([True, True, True, False]))
    say(f"dequantize {there}", filler.values)
    status = library.qinfer_dequantize(
        ctypes.byref(weight) if there else None,
        ctypes.c_int64(begin),
        ctypes.c_int64(end),
        ctypes.c_int32(dtype),
        ctypes.c_void_p(out),
        ctypes.c_int32(threads),
    )
    assert status in STATUSES
    if filler.missing or not there or end < begin or begin < 0:
        assert status == BAD_ARGUMENT


def fuzz_tiling(library: ctypes.CDLL, data: st.DataObject) -> None:
    """Repack weights that may be none."""
    filler = Filler(data, frozenset({"permutation"}))
    source, order, tiles = (filler.pointer(name) for name in ("weight", "permutation", "tiles"))
    outputs, inputs, kind = data.draw(SIZES), data.draw(SIZES), data.draw(st.integers(-1, 9))
    say(f"tile {source} {order} {tiles} {outputs}x{inputs} {kind}", {})
    sizes = (ctypes.c_int64(outputs), ctypes.c_int64(inputs))
    statuses = (
        library.qinfer_tile_codes(
            ctypes.c_void_p(source), *sizes, ctypes.c_void_p(order), ctypes.c_int32(kind),
            ctypes.c_void_p(tiles),
        ),
        library.qinfer_tile_dense(
            ctypes.c_void_p(source), *sizes, ctypes.c_int32(kind), ctypes.c_void_p(tiles)
        ),
    )  # fmt: skip
    assert set(statuses) <= set(STATUSES)
    if filler.missing or outputs < 0 or inputs < 0:
        assert set(statuses) == {BAD_ARGUMENT}


def fuzz_gram(library: ctypes.CDLL, isa: str) -> Callable[[st.DataObject], None]:
    """Return a property: rows are packed and their products added, or none of both."""

    def check(data: st.DataObject) -> None:
        filler = Filler(data, frozenset())
        x, packed = filler.pointer("x"), filler.pointer("packed")
        tokens, columns, stride = (filler.integer(name) for name in ("tokens", "columns", "stride"))
        say(f"{isa} pack", filler.values)
        status = library.qinfer_pack_pairs(
            ctypes.c_void_p(x),
            *(ctypes.c_int64(size) for size in (tokens, columns, stride)),
            ctypes.c_void_p(packed),
        )
        assert status in STATUSES
        if filler.missing or tokens < 0 or columns < 1 or stride < columns or isa != "avx512":
            assert status == BAD_ARGUMENT
        args, filler = GramArgs(), Filler(data, frozenset())
        filler.fill(args)
        begin, end = (data.draw(st.one_of(SIZES, st.sampled_from([0, 16, 64]))) for _ in range(2))
        there = data.draw(st.sampled_from([True, True, True, False]))
        say(f"{isa} gram {there} {begin}:{end}", filler.values)
        status = library.qinfer_add_gram(
            ctypes.byref(args) if there else None, ctypes.c_int64(begin), ctypes.c_int64(end)
        )
        assert status in STATUSES
        outside = begin < 0 or begin % 16 or end < begin or end > args.left_columns
        if filler.missing or not there or outside or isa != "avx512":
            assert status == BAD_ARGUMENT

    return check


def fuzz_others(library: ctypes.CDLL, data: st.DataObject) -> None:
    """Ask for scratch, instruction sets and programs that cannot be."""
    extreme = st.one_of(SIZES, st.sampled_from([-(2**31), 2**31 - 1]))
    threads, heads, kv_heads, head_dim = (data.draw(extreme) for _ in range(4))
    context = data.draw(st.one_of(SIZES, st.sampled_from([-(2**63), 2**63 - 1])))
    size = library.qinfer_attention_scratch
    size.restype = ctypes.c_int64
    say(f"scratch {threads} {context} {heads} {kv_heads} {head_dim}", {})
    floats = size(
        ctypes.c_int32(threads), ctypes.c_int64(context), ctypes.c_int32(heads),
        ctypes.c_int32(kv_heads), ctypes.c_int32(head_dim),
    )  # fmt: skip
    assert floats >= -1
    if min(threads, context + 1, heads, kv_heads, head_dim) < 1 or heads % kv_heads:
        assert floats == -1
    name = data.draw(st.one_of(st.none(), st.binary(max_size=20).map(lambda text: text + b"!")))
    assert library.qinfer_use_isa(name) == BAD_ARGUMENT
    count = data.draw(st.sampled_from([-1, 1, -(2**63), 2**63 - 1]))
    assert library.qinfer_run(None, ctypes.c_int64(count), ctypes.c_int32(1)) == BAD_ARGUMENT


def say(call: str, values: Mapping[str, object]) -> None:
    """Write down a call, so that the last one is known should it not return."""
    arguments = " ".join(f"{name}={value}" for name, value in values.items())
    sys.stdout.write(f"{call} {arguments}\n")
    sys.stdout.flush()


def main(path: str, examples: int) -> None:
    """Fuzz every entry point, each op on each instruction set of this machine."""
    library = ctypes.CDLL(path)

    def run(check: Callable[[st.DataObject], None]) -> None:
        checks = settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        checks(given(st.data())(check))()

    for isa in ("avx512", "avx2", "portable"):
        if library.qinfer_use_isa(isa.encode()) != 0:
            continue
        for kind in OpKind:
            run(fuzz_op(library, kind, isa))
        run(lambda data: fuzz_dequantize(library, data))
        run(fuzz_gram(library, isa))
    run(lambda data: fuzz_tiling(library, data))
    run(lambda data: fuzz_others(library, data))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
