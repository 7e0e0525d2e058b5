"""The figures of a record as text: one table for the terminal and the HTML page alike.

Units are decimal (MB = 10^6 bytes); times are medians over the timed requests.
"""

from dataclasses import dataclass

from qinfer.report.record import EvaluationRecord, EvaluationRow, RunRecord

MISSING = "-"


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table as text.

    Args:
        columns: headings.
        rows: cells, as many as there are columns.
        left: the first so many columns are names, the rest numbers.
    """

    columns: list[str]
    rows: list[list[str]]
    left: int


def evaluation_table(record: EvaluationRecord) -> TextTable:
    """Return quality, memory and speed side by side, one row per (checkpoint, KV type)."""
    names = _name_columns(record)
    levels = sorted({speed.concurrency for row in record.rows for speed in row.speed})
    columns = [*names, "KV", "PPL", "drift %", "KLD mean", "KLD p99", "top-1 %"]
    columns += ["weights MB", "disk MB", "KV B/token", "peak MB"]
    if levels:
        columns += [f"TTFT ms @{levels[0]}", f"TPOT ms @{levels[0]}"]
        columns += [f"tok/s @{level}" for level in levels]
    rows = [
        [
            *_names(row, names),
            row.kv_cache_dtype,
            *_quality(row),
            *_memory(row),
            *_speed(row, levels),
        ]
        for row in record.rows
    ]
    return TextTable(columns, rows, left=len(names) + 1)


def context_table(record: EvaluationRecord) -> TextTable:
    """Return the mean KL divergence by length of context, one row per (checkpoint, KV type)."""
    names = _name_columns(record)
    ranges = sorted(
        {(c.context_from, c.context_to) for row in record.rows for c in row.divergence.by_context}
    )
    rows = []
    for row in record.rows:
        means = {c.context_from: c.kld_mean for c in row.divergence.by_context}
        cells = [_small(means[low]) if low in means else MISSING for low, _ in ranges]
        rows.append([*_names(row, names), row.kv_cache_dtype, *cells])
    columns = [*names, "KV", *[f"{low}-{high}" for low, high in ranges]]
    return TextTable(columns, rows, left=len(names) + 1)


def row_label(record: EvaluationRecord, row: EvaluationRow) -> str:
    """Return a short name of a row: model or weights, and KV type."""
    return ", ".join([*_names(row, _name_columns(record)), f"{row.kv_cache_dtype} KV"])


def method_lines(record: EvaluationRecord) -> list[str]:
    """Return how the figures were taken: text, baseline, memory, speed and machine."""
    lines = [_text_line(record), _baseline_line(record), _memory_line(record)]
    if record.speed_method is not None and any(row.speed for row in record.rows):
        lines.append(_speed_line(record))
    where = record.environment
    machine = (
        f"Machine: {where.cpu}, {where.threads} threads, {where.device}; {where.platform}, "
        f"Python {where.python}, torch {where.torch}, qinfer {where.qinfer}; {where.created}."
    )
    return [*lines, machine]


def stage_line(run: RunRecord) -> str:
    """Return how long each stage of a run took."""
    total = sum(stage.seconds for stage in run.stages)
    parts = [f"{stage.name} {stage.seconds:.0f} s" for stage in run.stages]
    return f"Time: {', '.join(parts)}; {total:.0f} s in all."


def _text_line(record: EvaluationRecord) -> str:
    method = record.method
    bos = "a BOS token before each window" if method.bos else "no BOS added"
    return (
        f"Text: {method.text} (sha256 {method.text_sha256[:12]}), {method.num_windows} windows of "
        f"{method.window}, stride {method.stride}, {bos}; {method.tokens_scored} tokens scored. "
        f"{method.join[:1].upper()}{method.join[1:]}."
    )


def _baseline_line(record: EvaluationRecord) -> str:
    method = record.method
    return (
        f"Baseline: {method.baseline} ({method.baseline_dtype}, {method.baseline_kv_cache_dtype} "
        f"KV). KLD: {method.divergence}. Drift: change of perplexity against the baseline. "
        "All through the served path: the same kernels, scheduler and paged cache."
    )


def _memory_line(record: EvaluationRecord) -> str:
    starts = [row.memory.process_start_bytes for row in record.rows]
    known = [start for start in starts if start is not None]
    sizes = "Memory: weights as resident, KV with its scales, MB = 10^6 bytes"
    if not known:
        return f"{sizes}; no peak, because all rows shared one process."
    return (
        f"{sizes}; peak = most resident memory of a process of the row's own while loading and "
        f"serving, of which Python and torch hold {_megabytes(max(known))} MB before any model."
    )


def _speed_line(record: EvaluationRecord) -> str:
    speed = next(row.speed[0] for row in record.rows if row.speed)
    return (
        f"Speed: {speed.input_len} random prompt tokens, {speed.output_len} generated, greedy; "
        "@n = n requests at once; TTFT and TPOT are medians over "
        f"{speed.num_requests} requests, tok/s counts generated tokens; warm-up excluded."
    )


def _name_columns(record: EvaluationRecord) -> list[str]:
    """Leave the model's name out where each kind of weights belongs to one model only."""
    pairs = {(row.model, row.weights) for row in record.rows}
    kinds = {row.weights for row in record.rows}
    return ["weights"] if len(pairs) == len(kinds) else ["model", "weights"]


def _names(row: EvaluationRow, columns: list[str]) -> list[str]:
    return [row.weights] if columns == ["weights"] else [row.model, row.weights]


def _quality(row: EvaluationRow) -> list[str]:
    cells = [f"{row.quality.perplexity:.2f}"]
    if row.baseline:
        return [*cells, "baseline", MISSING, MISSING, MISSING]
    return [
        *cells,
        f"{row.quality.drift_percent:+.2f}",
        _small(row.divergence.mean),
        _small(row.divergence.p99),
        f"{100 * row.divergence.top1_agreement:.1f}",
    ]


def _memory(row: EvaluationRow) -> list[str]:
    memory = row.memory
    return [
        _megabytes(memory.weights_bytes),
        _megabytes(memory.checkpoint_bytes),
        f"{memory.kv_bytes_per_token:,}",
        _megabytes(memory.process_peak_bytes),
    ]


def _speed(row: EvaluationRow, levels: list[int]) -> list[str]:
    if not levels:
        return []
    by_level = {speed.concurrency: speed for speed in row.speed}
    first = by_level.get(levels[0])
    times = (
        [MISSING, MISSING]
        if first is None
        else [f"{1e3 * first.ttft_seconds.p50:.0f}", f"{1e3 * first.tpot_seconds.p50:.1f}"]
    )
    rates = [
        f"{by_level[level].output_tokens_per_second:.1f}" if level in by_level else MISSING
        for level in levels
    ]
    return times + rates


def _small(value: float) -> str:
    """Three significant digits, without an exponent where a reader can do without."""
    if value == 0:
        return "0"
    return f"{value:.3g}" if value >= 1e-4 else f"{value:.1e}"


def _megabytes(value: int | None) -> str:
    return MISSING if value is None else f"{value / 1e6:,.1f}"
