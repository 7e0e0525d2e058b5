"""Continuous against static batching, and what a long prompt does to running streams.

    python benchmarks/batching.py MODEL             # an idle machine, please
    python benchmarks/batching.py MODEL --rounds 1 --requests 16 --long-prompt 1024

Part one: 32 requests arrive at once, 8 run together. `mixed`: three quarters want 16 tokens, one
quarter 256. `uniform`: 16 to 256, evenly. Static batching computes every slot until the longest of
its batch is done, as textbooks describe it. Both engines are in one process and alternate; a round
gives a ratio of useful tokens per second.

Part two: 8 streams are decoding when a long prompt arrives; the gaps between their tokens (ITL)
while it is prefilled, with several budgets for it per step, against the gaps before.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peers.machine import describe_machine, describe_qinfer
from records import Record, free_files, write
from tables import spread, table

from qinfer import LLM, SamplingParams
from qinfer.bench.stats import percentiles

HERE = Path(__file__).parent
MODES = ("continuous", "static")
BATCH = 8
STREAM_PROMPT = 128  # tokens
STREAMS = 8
BUDGETS = (512, 128, 64)  # of prompts, beside the streams; 128 is the default


@dataclass
class Times:
    """When a request's tokens came, seconds on the performance counter."""

    added: float
    tokens: list[float] = field(default_factory=list)


def run(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> tuple[float, list[Times]]:
    """Serve all requests, which arrive now; returns the seconds that it took, and their times."""
    core = llm.core
    start = time.perf_counter()
    times = {}
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        core.add_request(str(index), prompt, params)
        times[str(index)] = Times(start)
    while core.has_unfinished:
        events = core.step()
        now = time.perf_counter()
        for event in events:
            times[event.request_id].tokens += [now] * len(event.token_ids)
    counts = [len(each.tokens) for each in times.values()]
    if counts != lengths:
        raise RuntimeError(f"{counts} tokens came, {lengths} were asked for")
    return time.perf_counter() - start, list(times.values())


def lengths_of(case: str, count: int, draw: random.Random) -> list[int]:
    """Return the outputs' lengths of a case, in an order drawn anew."""
    if case == "mixed":
        lengths = [256 if index % 4 == 3 else 16 for index in range(count)]
    else:
        lengths = [round(16 + 240 * index / (count - 1)) for index in range(count)]
    draw.shuffle(lengths)
    return lengths


def tokens(draw: random.Random, count: int, vocab_size: int) -> list[int]:
    return [draw.randrange(vocab_size) for _ in range(count)]


@contextmanager
def opened(args: argparse.Namespace, **options: Any) -> Iterator[LLM]:
    with LLM(
        args.model,
        device="cpu",
        threads=args.threads,
        kv_cache_dtype="int8",
        enable_prefix_caching=False,
        memory="2GiB",
        **options,
    ) as llm:
        yield llm


def compare_batching(args: argparse.Namespace) -> dict[str, Any]:
    """Measure part one."""
    draw = random.Random(args.seed)
    rows: dict[str, Any] = {
        case: {mode: {"tokens_per_second": [], "tpot": [], "ttft": []} for mode in MODES}
        for case in ("mixed", "uniform")
    }
    with (
        opened(args, max_num_seqs=BATCH, batching="continuous", max_model_len=512) as first,
        opened(args, max_num_seqs=BATCH, batching="static", max_model_len=512) as second,
    ):
        engines = dict(zip(MODES, (first, second), strict=True))
        vocab_size = first.model_config.vocab_size
        for number in range(args.rounds + 1):
            for case in rows:
                lengths = lengths_of(case, args.requests, draw)
                prompts = [tokens(draw, args.prompt_tokens, vocab_size) for _ in lengths]
                for mode in draw.sample(MODES, 2):
                    seconds, times = run(engines[mode], prompts, lengths)
                    if number == 0:
                        continue  # warm-up
                    row = rows[case][mode]
                    row["tokens_per_second"].append(sum(lengths) / seconds)
                    row["ttft"] += [each.tokens[0] - each.added for each in times]
                    row["tpot"] += [
                        (each.tokens[-1] - each.tokens[0]) / (len(each.tokens) - 1)
                        for each in times
                    ]
                    print(f"round {number} {case} {mode}: {sum(lengths) / seconds:.0f} tok/s")
    for row in rows.values():
        rates = [row[mode]["tokens_per_second"] for mode in MODES]
        row["ratio"] = [a / b for a, b in zip(*rates, strict=True)]
        for mode in MODES:
            for name in ("tpot", "ttft"):
                row[mode][name] = percentiles(row[mode][name]).to_dict()
    return rows


def gaps_of(core: Any, wanted: int, last: dict[str, float]) -> list[float]:
    """Step until `wanted` gaps between tokens of the streams were seen; returns them, seconds."""
    gaps: list[float] = []
    while len(gaps) < wanted:
        step(core, last, gaps)
    return gaps


def step(core: Any, last: dict[str, float], gaps: list[float]) -> bool:
    """Do one step; tells whether the long prompt gave its first token."""
    events = core.step()
    now = time.perf_counter()
    arrived = False
    for event in events:
        if event.request_id == "long":
            arrived = True
        elif event.token_ids:
            if event.request_id in last:
                gaps.append(now - last[event.request_id])
            last[event.request_id] = now
    return arrived


def measure_gaps(args: argparse.Namespace, budget: int) -> dict[str, Any]:
    """Measure part two with one token budget."""
    draw = random.Random(args.seed)
    with opened(
        args,
        max_num_seqs=STREAMS + 1,
        max_num_mixed_tokens=budget,
        max_model_len=args.long_prompt + 64,
    ) as llm:
        core, vocab_size = llm.core, llm.model_config.vocab_size
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        for index in range(STREAMS):
            core.add_request(f"stream-{index}", tokens(draw, STREAM_PROMPT, vocab_size), params)
        last: dict[str, float] = {}
        gaps_of(core, 8 * STREAMS, last)  # all are decoding now, and warm
        before = gaps_of(core, 64 * STREAMS, last)
        short = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        prompt = tokens(draw, args.long_prompt, vocab_size)
        start = time.perf_counter()
        core.add_request("long", prompt, short)
        during: list[float] = []
        while not step(core, last, during):
            pass
        result = {
            "budget": budget,
            "ttft_of_long_prompt": time.perf_counter() - start,
            "itl_before": percentiles(before).to_dict(),
            "itl_during": percentiles(during).to_dict(),
        }
        for index in range(STREAMS):
            core.abort(f"stream-{index}")
    print(f"budget {budget}: ITL p99 {result['itl_during']['p99'] * 1e3:.0f} ms")
    return result


def page(record: Record) -> str:
    """Return the tables."""
    rows = []
    for case, row in record["batching"].items():
        for mode in MODES:
            cell = row[mode]
            rows.append(
                [
                    *(case, mode, spread(cell["tokens_per_second"])),
                    spread(row["ratio"]) if mode == "continuous" else "1",
                    *(f"{cell['tpot'][p] * 1e3:.1f}" for p in ("p50", "p90", "p99")),
                    *(f"{cell['ttft'][p] * 1e3:.0f}" for p in ("p50", "p99")),
                ]
            )
    head = ["case", "batching", "tok/s", "ratio", *(f"TPOT {p} ms" for p in ("p50", "p90", "p99"))]
    count, size = record["requests"], record["prompt_tokens"]
    case = f"{count} requests of {size} tokens at once, {record['batch_limit']} run together."
    lines = ["# Continuous against static batching", "", case, ""]
    lines += table([*head, "TTFT p50 ms", "TTFT p99 ms"], rows)
    if record["long_prompt_gaps"]:
        lines += gaps_table(record)
    machine = record["machine"]
    where = f"{record['date']}, {machine['processor']}, {record['threads']} threads"
    return "\n".join([*lines, "", where, ""])


def gaps_table(record: Record) -> list[str]:
    """Return the table of part two."""
    lines = ["", f"# ITL of {STREAMS} streams while {record['long_prompt']} tokens arrive", ""]
    head = [
        "prompt tokens per step",
        "before: p50 ms",
        "p99",
        "during: p50 ms",
        "p99",
        "TTFT of it, s",
    ]
    cells = [
        [
            str(row["budget"]),
            *(f"{row['itl_before'][p] * 1e3:.1f}" for p in ("p50", "p99")),
            *(f"{row['itl_during'][p] * 1e3:.1f}" for p in ("p50", "p99")),
            f"{row['ttft_of_long_prompt']:.1f}",
        ]
        for row in record["long_prompt_gaps"]
    ]
    return [*lines, *table(head, cells)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory, hub id or .gguf file")
    parser.add_argument("--rounds", type=int, default=3, help="measured; one more warms up")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=32, help="of part one's requests")
    parser.add_argument(
        "--long-prompt",
        type=int,
        default=8000,
        help="tokens of part two's prompt; 0 = leave it out",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the record")
    args = parser.parse_args()
    now = datetime.now(UTC)
    files = free_files(args.out, f"{now:%Y-%m-%d}-batching", replace=False)
    record = {
        "format_version": 1,
        "date": now.isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "qinfer": describe_qinfer(HERE.parent),
        "model": Path(args.model).name,
        "threads": args.threads,
        "requests": args.requests,
        "batch_limit": BATCH,
        "prompt_tokens": args.prompt_tokens,
        "long_prompt": args.long_prompt,
        "batching": compare_batching(args),
        "long_prompt_gaps": [
            measure_gaps(args, budget) for budget in BUDGETS if args.long_prompt > 0
        ],
    }
    ratio = statistics.median(record["batching"]["mixed"]["ratio"])
    print(f"continuous gives {ratio:.2f} times the tokens per second of static batching (mixed)")
    write(files, record, page(record))
    print(f"wrote {files[0]}")


if __name__ == "__main__":
    main()
