"""From the record to its page of tables."""

import math
from collections.abc import Mapping
from typing import Any

from comparison.rows import ROWS, TARGETS, Target
from tables import table

Record = dict[str, Any]

METHOD = """\
Every row is measured by the code of `qinfer eval` against the same unquantized model in float32
with a float32 cache. All but what a row is about is exact: float32 activations, the head as it is,
and where weights are compared a float32 cache. All tools calibrate on the same token ids. The
peers' checkpoints are read by qinfer's own readers. llama.cpp starts from the same bfloat16
weights, has no importance matrix, makes all linears Q4_0 and leaves the embedding, which is the
head too, in bfloat16, so that the linears alone are compared. **Bits** are per weight of the
linears: codes, scales, and zero points where a grid has them.

Wall and CPU time and the peak resident memory are those of the tool's whole process, its start
included, on the threads named. CPU seconds are of all threads; on a machine that others use too
(see load) they say more than wall time.

The source's weights already lie on a 4-bit grid (Q4_1: groups of 32, asymmetric), so INT4 says what
moving them to another grid costs: compare methods on this base only."""


def figure(record: Record, row: str, path: tuple[str, ...]) -> float | None:
    """Return a figure of a row's record, or None if it was not measured."""
    value: Any = record["rows"].get(row)
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if value is None else float(value)


def judge(record: Record, target: Target) -> dict[str, Any]:
    """Return what was reached of a target; `met` is None where a figure is missing."""
    ours = figure(record, target.ours, target.figure)
    others = {name: figure(record, name, target.figure) for name in target.against}
    known = {name: value for name, value in others.items() if value is not None}
    result: dict[str, Any] = {"at": target.at, "ours": ours, "reach": target.reach, "met": None}
    if target.against:
        best = min(known, key=known.__getitem__, default=None)
        result["against"] = best
        result["theirs"] = None if best is None else known[best]
        if ours is not None and best is not None:
            result["ratio"] = ours / known[best]
            result["met"] = result["ratio"] <= target.reach
    elif ours is not None:
        result["met"] = ours <= target.reach
    return result


def markdown(record: Record) -> str:
    """Return the page of a record."""
    machine, method = record["machine"], record["method"]
    facts = (
        f"{machine['processor']}, {machine['cores']} cores ({machine['features']}), "
        f"{machine['memory']}; {machine['system']}; Python {machine['python']}. Calibration: "
        f"{method['samples']} x {method['seq_len']} tokens of {method['calibration']}. Measured: "
        f"windows of 512 over {method['tokens']} tokens of {method['text']}."
    )
    lines = [
        f"# Quantization beside peers, {record['date'][:10]}",
        "",
        facts,
        "",
        "## What was to be reached",
        "",
        *_targets(record),
        "",
        "## Rows",
        "",
        *_rows(record),
        "",
        *_absent(record),
        "## Checkpoints",
        "",
        *_checkpoints(record),
        "",
        "## Method",
        "",
        METHOD,
    ]
    return "\n".join(lines) + "\n"


def _targets(record: Record) -> list[str]:
    head = ["at", "qinfer", "against", "theirs", "ratio or figure", "reach", "met"]
    rows = []
    for target in TARGETS:
        found = judge(record, target)
        ratio = found.get("ratio", None if target.against else found["ours"])
        met = {True: "yes", False: "**no**", None: "not measured"}[found["met"]]
        cells = [_number(found["ours"]), found.get("against") or "", _number(found.get("theirs"))]
        rows.append([target.at, *cells, _number(ratio), _number(target.reach), met])
    return table(head, rows)


def _rows(record: Record) -> list[str]:
    head = ["row", "bits", "KLD mean", "KLD p99", "same top token %", "perplexity", "unquantized"]
    head.append("tokens scored")
    rows = []
    for row in ROWS:
        measured = record["rows"].get(row.name, {}).get("measured")
        if measured is not None:
            figures = [measured[name] for name in ("kld_mean", "kld_p99")]
            agree = f"{100 * measured['top1_agreement']:.2f}"
            perplexities = [measured[name] for name in ("perplexity", "perplexity_unquantized")]
            bits = _number(record["rows"][row.name].get("bits_per_weight"))
            cells = [*map(_number, figures), agree, *(f"{value:.3f}" for value in perplexities)]
            scored = str(record["rows"][row.name]["baseline"]["tokens_scored"])
            rows.append([row.name, bits, *cells, scored])
    return table(head, rows)


def _absent(record: Record) -> list[str]:
    absent = record["absent"]
    if not absent:
        return []
    rows = [[name, reason] for name, reason in absent.items()]
    return ["## Absent", "", *table(["row", "reason"], rows), ""]


def _checkpoints(record: Record) -> list[str]:
    head = ["row", "wall s", "CPU s", "peak MB", "threads", "load", "MB", "made by", "qinfer at"]
    rows = []
    for row in ROWS:
        entry = record["rows"].get(row.name)
        if entry is None or not entry["made"]:
            continue
        made = entry["made"]
        versions = ", ".join(f"{name} {text}" for name, text in made.get("versions", {}).items())
        options = made["options"]
        told = " ".join(options) if isinstance(options, list) else options
        rows.append(
            [
                row.name,
                *(_number(made.get(name)) for name in ("wall_seconds", "cpu_seconds")),
                _number(made.get("peak_rss_bytes", math.nan) / 1e6),
                str(made["threads"]),
                _number(made.get("load_average")),
                _number(entry["bytes"] / 1e6),
                f"{versions}: {told}" if told else versions,
                entry["commit"],
            ]
        )
    return table(head, rows)


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return ""
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.3g}"
