"""Speed of the linear and the attention op, against peaks that the same run measures.

    python benchmarks/kernels.py                                   # all of it, into results/
    python benchmarks/kernels.py --shapes smollm2 --rows 1 512 --variants "int4 g64" --print-only

The weights of a case are copies of a model's linears, so many that they do not fit the caches
where rows are few; each layer has pages of its own. In every round each case runs once on each
number of threads, with the peaks measured beside it; percentages are of the highest peak among the
rounds. With one thread the clock counts that thread's own time, which neighbours on the machine
disturb least.

Gop/s counts two operations per weight and row, against `vpdpbusd` (int8 activations), `vdpbf16ps`
(bf16) or FMA (exact) on registers only; GB/s counts the weights or pages read once, against plain
reads of as many bytes.
"""

import argparse
import statistics
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attention
import records
import torch
from linears import FEW_ROWS, SHAPES, VARIANTS, Variant, make_case
from peaks import Peaks
from peers.machine import describe_machine, describe_qinfer
from tables import number, spread, table

from qinfer.kernels.cpu import native
from qinfer.kernels.cpu.arena import Arena

HERE = Path(__file__).parent
HEADS = {
    "smollm2": attention.Heads(9, 3, 64, 30),
    "llama-1.1b": attention.Heads(32, 4, 64, 22),
}
LOADS = (attention.Load(1, 1, 1024), attention.Load(8, 1, 4096), attention.Load(1, 512, 512))
PAGES = ("int8", "fp16")


class Run:
    """The settings of a run and what it measured.

    Args:
        args: of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.rounds, self.threads, self.megabytes = args.rounds, args.threads, args.megabytes
        self.peaks = {threads: Peaks(threads) for threads in args.threads}
        self.linears: list[records.Record] = []
        self.attention: list[records.Record] = []

    def measure_linear(self, shapes: str, variant: Variant, rows: int) -> None:
        """Time a model's linears on each number of threads."""
        case = make_case(variant, SHAPES[shapes], rows, self.megabytes)
        samples: dict[int, tuple[list[float], ...]] = {
            threads: ([], [], []) for threads in self.threads
        }
        case.seconds(max(self.threads))  # warms up
        for _ in range(self.rounds):
            for threads, (times, operations, reads) in samples.items():
                times.append(case.seconds(threads))
                operations.append(self.peaks[threads].arithmetic(variant.activations))
                if rows <= FEW_ROWS:
                    reads.append(self.peaks[threads].read(case.address, case.weight_bytes))
        for threads, (times, operations, reads) in samples.items():
            entry = {
                "shapes": shapes,
                "weights": variant.name,
                "rows": rows,
                "threads": threads,
                "seconds": times,
                "operations": case.operations,
                "bytes": case.weight_bytes,
                "arithmetic_peak": operations,
                "read_peak": reads,
            }
            self.linears.append(entry)
            print(" | ".join((shapes, *linear_row(entry))), flush=True)

    def measure_attention(self, shapes: str, load: attention.Load) -> None:
        """Time attention over each type of pages on each number of threads."""
        cases = {kv: attention.Case(HEADS[shapes], kv, load, max(self.threads)) for kv in PAGES}
        memory = Arena(self.megabytes << 20).take((self.megabytes << 20,), torch.uint8).fill_(1)
        samples: dict[tuple[str, int], tuple[list[float], ...]] = {
            (kv, threads): ([], []) for threads in self.threads for kv in PAGES
        }
        for case in cases.values():
            case.seconds(max(self.threads))  # warms up
        for _ in range(self.rounds):
            for (kv, threads), (times, reads) in samples.items():
                times.append(cases[kv].seconds(threads))
                reads.append(self.peaks[threads].read(memory.data_ptr(), memory.nbytes))
        for (kv, threads), (times, reads) in samples.items():
            entry = {
                "shapes": shapes,
                "load": load.name,
                "kv": kv,
                "threads": threads,
                "seconds": times,
                "operations": cases[kv].operations,
                "bytes": cases[kv].bytes,
                "read_peak": reads,
            }
            self.attention.append(entry)
        for threads in self.threads:
            int8, fp16 = (self._times(shapes, load, kv, threads) for kv in PAGES)
            print(f"{shapes} | {load.name} | {threads} threads: fp16 {1e3 * fp16:.2f} ms, "
                  f"int8 {1e3 * int8:.2f} ms, {fp16 / int8:.2f} x", flush=True)  # fmt: skip

    def _times(self, shapes: str, load: attention.Load, kv: str, threads: int) -> float:
        key = (shapes, load.name, kv, threads)
        (entry,) = (entry for entry in self.attention if attention_key(entry) == key)
        return statistics.median(entry["seconds"])


def attention_key(entry: records.Record) -> tuple[str, str, str, int]:
    """Return what tells an attention entry from the others."""
    return entry["shapes"], entry["load"], entry["kv"], entry["threads"]


def linear_row(entry: records.Record) -> list[str]:
    """Return the cells of a linear entry."""
    times, operations = entry["seconds"], entry["operations"]
    cells = [
        entry["weights"],
        str(entry["rows"]),
        str(entry["threads"]),
        spread([1e3 * time for time in times]),
        spread([operations / time / 1e9 for time in times]),
        *_percent(operations, times, entry["arithmetic_peak"]),
    ]
    if not entry["read_peak"]:
        return [*cells, "", "", ""]
    return [
        *cells,
        spread([entry["bytes"] / time / 1e9 for time in times]),
        *_percent(entry["bytes"], times, entry["read_peak"]),
    ]


def _percent(amount: int, times: list[float], peaks: list[float]) -> tuple[str, str]:
    """Return the highest peak in 1e9 per second, and the share of it that each round reached."""
    peak = max(peaks)
    return number(peak / 1e9), spread([100 * amount / time / peak for time in times])


def attention_rows(entries: list[records.Record]) -> Iterator[list[str]]:
    """Yield the cells of each entry; beside INT8 pages, how much faster they are than fp16."""
    by_key = {attention_key(entry): entry for entry in entries}
    for entry in entries:
        shapes, load, kv, threads = attention_key(entry)
        times = entry["seconds"]
        fp16 = by_key[shapes, load, "fp16", threads]["seconds"]
        gain = [slow / fast for slow, fast in zip(fp16, times, strict=True)]
        yield [
            load,
            kv,
            str(threads),
            spread([1e3 * time for time in times]),
            spread([entry["operations"] / time / 1e9 for time in times]),
            spread([entry["bytes"] / time / 1e9 for time in times]),
            *_percent(entry["bytes"], times, entry["read_peak"]),
            spread(gain) if kv != "fp16" else "",
        ]


def markdown(record: records.Record) -> str:
    """Return the page of a run."""
    machine, qinfer = record["machine"], record["qinfer"]
    facts = (
        f"{machine['processor']}, {machine['cores']} cores ({machine['features']}), "
        f"{machine['cache']} cache, {machine['memory']}; {machine['system']}. "
        f"qinfer {qinfer['version']}, commit {qinfer['commit']}, kernels {record['isa']}. "
        f"{record['rounds']} rounds; median [lowest-highest]."
    )
    lines = [
        f"# Kernels against the machine's peaks, {record['date'][:10]}",
        "",
        facts,
        "",
        __doc__.partition("\n\n")[2].partition("\n\n")[2].strip(),
        "",
    ]
    head = ["weights", "rows", "threads", "ms", "Gop/s", "peak", "% of peak"]
    head += ["GB/s", "reads", "% of reads"]
    for shapes in dict.fromkeys(entry["shapes"] for entry in record["linears"]):
        rows = [linear_row(item) for item in record["linears"] if item["shapes"] == shapes]
        lines += [f"## Linears of {shapes}", "", *table(head, rows), ""]
    head = ["load", "pages", "threads", "ms", "Gop/s", "GB/s", "reads", "% of reads", "fp16 / int8"]
    for shapes in dict.fromkeys(entry["shapes"] for entry in record["attention"]):
        entries = [item for item in record["attention"] if item["shapes"] == shapes]
        lines += [f"## Attention of {shapes}, all layers", ""]
        lines += [*table(head, list(attention_rows(entries))), ""]
    return "\n".join(lines)


def measure(args: argparse.Namespace) -> Iterator[Run]:
    """Yield the run after each model's linears and attention."""
    run = Run(args)
    for shapes in args.shapes:
        for variant in VARIANTS:
            if variant.name in args.variants:
                for rows in args.rows:
                    run.measure_linear(shapes, variant, rows)
        yield run
        for load in () if args.no_attention else LOADS:
            run.measure_attention(shapes, load)
        yield run


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--variants", nargs="+", choices=names, default=names)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 32, 128, 512])
    parser.add_argument("--no-attention", action="store_true")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=200, help="weights, where rows are few")
    parser.add_argument("--isa", help="portable, avx2 or avx512; default: the best there is")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the record")
    parser.add_argument("--print-only", action="store_true", help="no record")
    args = parser.parse_args()
    library = native.load()
    if library is None or (args.isa and not library.use_isa(args.isa)):
        parser.error("the C++ kernels or this instruction set are not available")
    args.isa = library.isa
    return args


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    facts: dict[str, Any] = {
        "format_version": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "qinfer": describe_qinfer(HERE.parent),
        "isa": args.isa,
        "rounds": args.rounds,
    }
    stem = f"{facts['date'][:10]}-kernels"
    files = None if args.print_only else records.free_files(args.out, stem, replace=False)
    print("shapes | weights | rows | threads | ms | Gop/s | peak | % | GB/s | reads | %")
    for run in measure(args):
        record = facts | {"linears": run.linears, "attention": run.attention}
        if files is not None:
            records.write(files, record, markdown(record))


if __name__ == "__main__":
    main()
