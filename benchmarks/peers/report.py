"""From the record of a run to its files: JSON with every sample, Markdown with the tables."""

import json
import statistics
from pathlib import Path
from typing import Any

Record = dict[str, Any]

METHOD = """\
One process per engine, stopped (SIGSTOP) while another one is measured. A round takes each work in
turn and lets every engine do it once, in an order drawn anew, with the same prompts of random token
ids, fresh in every round; one more round before the first warms up and is not counted. Greedy, EOS
ignored. **Prefill**: from the prompt's tokens to its first new token, one sequence; "at depth 1024"
the sequence's first 1024 tokens are in the cache when the clock starts. **Decode**: every sequence
has its prompt in the cache and its first new token; the clock runs over the next steps, one
token of every sequence each, and ends with the last token known to the host. qinfer and OpenVINO
are timed with their scheduler (qinfer: with its detokenizer too), llama.cpp and transformers with
bare forward calls and an argmax.

Rates are the median [lowest-highest] of the rounds. A ratio is taken within each round; shown are
its median and [lowest-highest]."""


def write(record: Record, folder: Path) -> list[Path]:
    """Write the record as JSON and as Markdown, named after the day, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{record['date'][:10]}-cpu-peers{'-quick' if record['quick'] else ''}"
    paths = [folder / f"{stem}.json", folder / f"{stem}.md"]
    paths[0].write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(record), encoding="utf-8")
    return paths


def markdown(record: Record) -> str:
    """Return the page of a run."""
    machine = record["machine"]
    steps = {work["steps"] for work in record["works"]} - {0}
    facts = (
        f"{machine['processor']}, {machine['cores']} cores ({machine['features']}), "
        f"{machine['cache']} cache, {machine['memory']}; {machine['system']}; "
        f"Python {machine['python']}; {record['threads']} threads. qinfer "
        f"{record['qinfer']['version']}, commit {record['qinfer']['commit']}. "
        f"Model: {record['model']}; qinfer's weights: {record['algorithm'].upper()}. "
        f"{record['rounds']} rounds; {' or '.join(map(str, sorted(steps)))} decode steps."
    )
    lines = [
        f"# CPU engines side by side, {record['date'][:10]}",
        "",
        *(["**A quick run: these numbers are noise.**", ""] if record["quick"] else []),
        facts,
        "",
        "## Tokens per second",
        "",
        *_speeds(record),
        "",
        "## qinfer / peer",
        "",
        *_ratios(record),
        "",
        *_absent(record),
        "## Engines",
        "",
        *_engines(record),
        "",
        _noise(record),
        "",
        "## Method",
        "",
        METHOD,
        "",
    ]
    return "\n".join(lines)


def _speeds(record: Record) -> list[str]:
    engines = record["engines"]
    rows = [
        [engine["name"], *(_spread(engine["tokens_per_second"][name]) for name in _names(record))]
        for engine in engines
    ]
    return _table(["engine", *_names(record)], rows)


def _ratios(record: Record) -> list[str]:
    """Return one row per pair of a qinfer and a peer with weights as wide or wider, and the best.

    qinfer's INT8 is not compared with 4-bit peers: they read half the bytes.
    """
    own = [engine for engine in record["engines"] if _is_own(engine)]
    peers = [engine for engine in record["engines"] if not _is_own(engine)]
    rows = []
    for engine in own:
        rivals = [peer for peer in peers if peer["bits"] >= engine["bits"]]
        pairs = [(engine["name"], peer["name"], peer) for peer in rivals]
        rows += [
            [left, right, *(_ratio(engine, peer, name) for name in _names(record))]
            for left, right, peer in pairs
        ]
        best = [_best(rivals, name) for name in _names(record)]
        cells = [
            "" if peer is None else f"**{_ratio(engine, peer, name)}**"
            for peer, name in zip(best, _names(record), strict=True)
        ]
        if len(rivals) > 1:
            rows.append([engine["name"], "**the best of them**", *cells])
    rows += _own_ratios(own, _names(record))
    return _table(["qinfer", "peer", *_names(record)], rows) if rows else ["No pair was measured."]


def _own_ratios(own: list[Record], names: list[str]) -> list[list[str]]:
    """Return what INT8 KV gains over fp16 KV, if both were measured."""
    by_name = {engine["name"]: engine for engine in own}
    int8 = by_name.get("qinfer int4 g64, KV int8")
    fp16 = by_name.get("qinfer int4 g64, KV fp16")
    if int8 is None or fp16 is None:
        return []
    return [[int8["name"], fp16["name"], *(_ratio(int8, fp16, name) for name in names)]]


def _best(peers: list[Record], name: str) -> Record | None:
    measured = [peer for peer in peers if peer["tokens_per_second"][name]]
    return max(
        measured, key=lambda peer: statistics.median(peer["tokens_per_second"][name]), default=None
    )


def _ratio(engine: Record, peer: Record, name: str) -> str:
    ours, theirs = engine["tokens_per_second"][name], peer["tokens_per_second"][name]
    if not ours or len(ours) != len(theirs):
        return ""
    return _spread([a / b for a, b in zip(ours, theirs, strict=True)])


def _absent(record: Record) -> list[str]:
    reasons = [f"- {name}: {reason}" for name, reason in record["absent"].items()]
    for engine in record["engines"]:
        for work, reason in engine["failures"].items():
            reasons.append(f"- {engine['name']}, {work}: {reason}")
    return ["## Absent", "", *reasons, ""] if reasons else []


def _engines(record: Record) -> list[str]:
    rows = [
        [
            engine["name"],
            "; ".join(f"{name} {value}" for name, value in engine["versions"].items()),
            f"{engine['peak_rss_bytes'] / 1e6:.0f}",
            f"{engine['idle_cores']:.2f}",
        ]
        for engine in record["engines"]
    ]
    return _table(["engine", "versions", "peak RSS, MB", "cores used when idle"], rows)


def _noise(record: Record) -> str:
    shares = [
        share
        for engine in record["engines"]
        for samples in engine["others_share"].values()
        for share in samples
    ]
    if not shares:
        return "Nothing was measured."
    return (
        f"Other programs took {100 * statistics.median(shares):.0f} % of the machine's CPU time "
        f"during the measurements (median; at most {100 * max(shares):.0f} %)."
    )


def _names(record: Record) -> list[str]:
    return [work["name"] for work in record["works"]]


def _is_own(engine: Record) -> bool:
    return bool(engine["name"].startswith("qinfer"))


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    low, middle, high = min(values), statistics.median(values), max(values)
    if len(values) == 1:
        return _number(middle)
    return f"{_number(middle)} [{_number(low)}-{_number(high)}]"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 20 else f"{value:.2f}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]
