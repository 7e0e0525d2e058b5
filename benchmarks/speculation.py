"""Tokens per second with and without drafts, on one stream and on several.

    python benchmarks/speculation.py MODEL --draft DRAFT --output benchmarks/results/NAME.json

Every way of drafting is an engine of its own in one process; the engines take turns on each
workload, so that a busy machine slows all of them. The answers of all engines are compared token by
token. Speed is that of decoding: tokens after the first over the time after it, all streams
together; the median of the rounds. One round warms up and is not measured.

The first workload asks for its own text again, which looking up can find; the second does not.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qinfer import LLM, SamplingParams
from qinfer.checkpoint.hub import demo_model, resolve_model
from qinfer.engine.request import RequestOutput
from qinfer.report.environment import describe
from qinfer.report.jsonio import dump_json, write_atomic

TEXT = (
    "The harbour master kept a ledger of every ship that entered the bay. On the first page he "
    "wrote the name of the ship, on the second its cargo, and on the third the names of the crew. "
    "When the brig Aurora arrived in March with a load of copper and dried fish, he noticed that "
    "the third page stayed empty. Nobody had signed. He walked down to the pier, knocked on the "
    "hull, and waited. After a while a cat came out, looked at him, and went back in."
)
WORKLOADS = {
    "copy": f"Repeat the following text word for word, and write nothing else.\n\n{TEXT}",
    "ordinary": "Explain in a few paragraphs how a rainbow forms and why it is curved.",
}
SEED = 1


def main() -> None:
    options = _options()
    model = resolve_model(options.model or demo_model())
    ways = {"none": None, "ngram": "ngram"}
    if options.draft is not None:
        ways[f"model {Path(options.draft).name}"] = str(options.draft)
    engines = {
        name: LLM(model, speculative=way, num_speculative_tokens=options.tokens, threads=2)
        for name, way in ways.items()
    }
    rows = []
    for workload, question in WORKLOADS.items():
        for temperature in options.temperatures:
            for streams in options.streams:
                params = SamplingParams(
                    temperature=temperature, seed=SEED, max_tokens=options.max_tokens
                )
                chats = [[{"role": "user", "content": question}]] * streams
                for row in _measure(engines, chats, params, options.rounds):
                    rows.append({"workload": workload, "temperature": temperature, **row})
                    print(json.dumps(rows[-1]))
    first = engines["none"]
    _write(
        options.output,
        {
            "model": Path(model).name,
            "dtype": first.config.dtype,
            "weights": (first.checkpoint.config.get("quantization_config") or {}).get("bits"),
            "temperatures": options.temperatures,
            "streams": options.streams,
            "num_speculative_tokens": options.tokens,
            "max_tokens": options.max_tokens,
            "rounds": options.rounds,
            "rows": rows,
        },
        asdict(describe(device=first.config.device, threads=first.config.threads or 0)),
    )


def _measure(
    engines: dict[str, LLM], chats: list[Any], params: SamplingParams, rounds: int
) -> list[dict[str, Any]]:
    """Let the engines take turns; return a row for each."""
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    drafted, accepted, tokens = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0), 0
    expected: list[list[int]] = []
    for number in range(rounds + 1):
        for name, llm in engines.items():
            before = llm.core.stats()
            start = time.perf_counter()
            outputs = llm.chat(chats, params)
            seconds = time.perf_counter() - start
            texts = [output.outputs[0].token_ids for output in outputs]
            expected = expected or texts
            if texts != expected:
                raise SystemExit(f"{name} gave other tokens than {next(iter(engines))}")
            after = llm.core.stats()
            if number:
                speeds[name].append(_speed(outputs, seconds))
                drafted[name] += after.draft_tokens - before.draft_tokens
                accepted[name] += after.accepted_draft_tokens - before.accepted_draft_tokens
                tokens = sum(map(len, texts))
    plain = statistics.median(speeds["none"])
    return [
        {
            "streams": len(chats),
            "drafts": name,
            "tokens": tokens,
            "tokens_per_second": round(statistics.median(speeds[name]), 1),
            "of_plain": round(statistics.median(speeds[name]) / plain, 3),
            "drafted": drafted[name],
            "accepted": accepted[name],
            "accepted_share": round(accepted[name] / drafted[name], 3) if drafted[name] else None,
        }
        for name in engines
    ]


def _speed(outputs: list[RequestOutput], seconds: float) -> float:
    """Return tokens per second after the first tokens."""
    first = max(output.metrics.ttft or 0.0 for output in outputs)
    count = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    return count / (seconds - first)


def _write(file: Path | None, run: dict[str, Any], environment: dict[str, Any]) -> None:
    """Add a run to a file; an earlier one of the same model and workloads is replaced."""
    if file is None:
        return
    data = json.loads(file.read_text()) if file.exists() else {"kind": "speculation", "runs": []}
    names = ("model", "weights", "temperatures", "streams")
    kept = [old for old in data["runs"] if any(old[name] != run[name] for name in names)]
    data |= {"environment": environment, "method": __doc__, "runs": [*kept, run]}
    write_atomic(file, dump_json(data))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="the demo model if not given")
    parser.add_argument("--draft", type=Path, help="draft model of the same tokenizer")
    parser.add_argument("--tokens", type=int, default=4, help="of a draft at most")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
