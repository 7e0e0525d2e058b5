"""`qinfer bench`: TTFT, TPOT and throughput of a model, without HTTP in between."""

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from qinfer.bench.offline import BenchRow, offline_method, run_offline
from qinfer.bench.record import BenchMemory, BenchRecord, require_same_method
from qinfer.cli import console
from qinfer.cli.loading import load_llm
from qinfer.cli.options import (
    EngineOptions,
    check_folder,
    engine_options,
    model_argument,
    parse_integers,
)
from qinfer.engine.llm import LLM
from qinfer.engine.metrics import EngineStats
from qinfer.report.environment import describe
from qinfer.report.jsonio import build, dump_json, load_json, write_atomic
from qinfer.report.record import SpeedFigures

_POSITIVE = click.IntRange(min=1)


@click.command(short_help="Measure TTFT, TPOT and throughput.")
@model_argument
@click.option(
    "--input-len", type=_POSITIVE, default=128, show_default=True, help="Prompt tokens per request."
)
@click.option(
    "--output-len",
    type=click.IntRange(min=2),
    default=64,
    show_default=True,
    help="Generated tokens per request.",
)
@click.option(
    "--concurrency",
    callback=parse_integers,
    default="1,4,8",
    show_default=True,
    metavar="N,N,…",
    help="Requests that arrive at once, one row of figures for each.",
)
@click.option(
    "--num-requests",
    type=_POSITIVE,
    default=8,
    show_default=True,
    help="Measured requests per level, rounded up to whole batches.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random prompts.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=check_folder,
    help="Write the record: figures, method, machine.",
)
@click.option(
    "--compare",
    "earlier_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Show the change against an earlier record; refused if it was measured differently.",
)
@engine_options(without={"seed", "max_queue"})
def command(
    model: str,
    *,
    concurrency: tuple[int, ...],
    json_file: Path | None,
    earlier_file: Path | None,
    engine: EngineOptions,
    **workload: Any,
) -> None:
    """Measure MODEL (directory, hub id or .gguf file): random prompts in closed batches.

    At each concurrency that many requests arrive at once, and the next batch starts when the last
    of them is done. One batch per level warms up and is not measured. Decoding is greedy and
    ignores EOS, so every request gives exactly --output-len tokens.

    \b
    Examples:
      qinfer bench MODEL
      qinfer bench MODEL --kv-cache-dtype int8 --concurrency 1,8 --num-requests 100 --json int8.json
      qinfer bench MODEL --compare int8.json --num-requests 100
    """
    earlier = None if earlier_file is None else BenchRecord.from_dict(load_json(earlier_file))
    with load_llm(model, engine) as llm:
        method = offline_method(llm, **workload)
        where = describe(device=llm.config.device, threads=llm.config.threads or 0)
        if earlier is not None:
            require_same_method(method, earlier.method, where, earlier.environment)
        with console.Stages() as stages:
            rows = run_offline(
                llm,
                concurrency=concurrency,
                on_progress=lambda done, total: stages.update("requests", done, total),
                **workload,
            )
        record = BenchRecord(
            model=model,
            dtype=llm.config.dtype,
            kv_cache_dtype=llm.config.kv_cache_dtype,
            method=method,
            environment=where,
            memory=_memory(llm),
            rows=tuple(build(SpeedFigures, row.to_dict(), where="row") for row in rows),
        )
        stats = llm.core.stats()
    console.show(_table(record, rows))
    console.show(_method_line(record))
    if "speculative" in record.method:
        console.show(_speculation_line(record, stats))
    if earlier is not None:
        console.show(_comparison(record, earlier))
    if json_file is not None:
        write_atomic(json_file, dump_json(record.to_dict()))


def _memory(llm: LLM) -> BenchMemory:
    report = llm.memory()
    return BenchMemory(
        weights_bytes=report.weights_bytes,
        kv_bytes_per_token=report.kv_bytes_per_token,
        kv_allocated_bytes=report.kv_allocated_bytes,
        kv_peak_bytes=report.kv_peak_bytes,
        process_peak_bytes=report.peak_rss_bytes,
    )


def _table(record: BenchRecord, rows: list[BenchRow]) -> Table:
    columns = ["concurrency", "requests", "TTFT ms p50", "p90", "p99", "TPOT ms p50", "p90", "p99"]
    columns += ["latency s p50", "tok/s out", "tok/s total"]
    return console.table(
        f"{record.model}: {record.dtype}, {record.kv_cache_dtype} KV, "
        f"{record.method['input_len']} tokens in, {record.method['output_len']} out",
        columns,
        [_cells(row) for row in rows],
    )


def _cells(row: BenchRow) -> list[str]:
    mark = "" if row.ttft.p99_reliable else "*"
    failed = f" ({row.num_failed} failed)" if row.num_failed else ""
    return [
        str(row.concurrency),
        f"{row.num_requests}{failed}",
        f"{1e3 * row.ttft.p50:.1f}",
        f"{1e3 * row.ttft.p90:.1f}",
        f"{1e3 * row.ttft.p99:.1f}{mark}",
        f"{1e3 * row.tpot.p50:.2f}",
        f"{1e3 * row.tpot.p90:.2f}",
        f"{1e3 * row.tpot.p99:.2f}{mark}",
        f"{row.latency.p50:.3f}",
        f"{row.output_tokens_per_second:.1f}",
        f"{row.total_tokens_per_second:.1f}",
    ]


def _method_line(record: BenchRecord) -> str:
    method, where, memory = record.method, record.environment, record.memory
    line = (
        f"TTFT: {method['ttft']}; TPOT: {method['tpot']}; percentiles: {method['percentiles']}; "
        f"warm-up: {method['warmup']}; {method['sampling']}.\n"
        f"Weights {console.megabytes(memory.weights_bytes)}, "
        f"KV {memory.kv_bytes_per_token:,} B per token, "
        f"at most {console.megabytes(memory.kv_peak_bytes)} of "
        f"{console.megabytes(memory.kv_allocated_bytes)} in use; "
        f"{where.cpu}, {where.threads} threads."
    )
    if not all(row.ttft_seconds.p99_reliable for row in record.rows):
        line += "\n* fewer than 100 samples: hardly more than the slowest request."
    return line


def _speculation_line(record: BenchRecord, stats: EngineStats) -> str:
    """Return how often drafts were right, over all levels and warm-ups."""
    right, drafted = stats.accepted_draft_tokens, stats.draft_tokens
    share = f" ({right / drafted:.0%})" if drafted else ""
    return (
        f"Speculative decoding with {record.method['speculative']}: {right:,} of {drafted:,} "
        f"drafted tokens came true{share}; {stats.generation_tokens:,} tokens were generated."
    )


def _comparison(record: BenchRecord, earlier: BenchRecord) -> Table:
    """Show ratios for the levels that both records have."""
    before = {row.concurrency: row for row in earlier.rows}
    cells = []
    for row in record.rows:
        old = before.get(row.concurrency)
        if old is None:
            continue
        ratios = (
            row.ttft_seconds.p50 / old.ttft_seconds.p50,
            row.tpot_seconds.p50 / old.tpot_seconds.p50,
            row.output_tokens_per_second / old.output_tokens_per_second,
        )
        cells.append([str(row.concurrency), *(f"{ratio:.2f} x" for ratio in ratios)])
    return console.table(
        f"against {earlier.model}, {earlier.kv_cache_dtype} KV",
        ["concurrency", "TTFT p50", "TPOT p50", "tok/s out"],
        cells,
    )
