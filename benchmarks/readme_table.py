"""The README's table of speed, made from the newest record of cpu_peers.py.

    python benchmarks/readme_table.py            # writes it between the markers
    python benchmarks/readme_table.py --check    # fails if the README says anything else

So README and records cannot disagree. A record counts when its run was no quick one, was finished
and has qinfer's INT4 beside a peer.
"""

import argparse
import statistics
import sys
import textwrap
from pathlib import Path

import records
from peers import report
from records import Record
from tables import number, spread, table

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN = "<!-- speed: made by benchmarks/readme_table.py -->"
END = "<!-- /speed -->"

OWN = "qinfer int4 g64, KV int8"
# Engines that are shown, where they were measured, and what they are called.
LABELS = {
    OWN: "**qinfer** INT4 g64, KV INT8",
    "llama.cpp Q4_0, KV f16, flash": "llama.cpp Q4_0, KV f16, flash attention",
    "llama.cpp Q4_0, KV q8_0, flash": "llama.cpp Q4_0, KV q8_0, flash attention",
    "OpenVINO int4, KV u8": "OpenVINO GenAI INT4, KV u8",
    "vLLM GPTQ int4 g64, KV bf16": "vLLM, the same GPTQ-format INT4 g64",
    "GPTQModel GPTQ int4 g64, KV bf16": "GPTQModel, the same GPTQ-format INT4 g64",
    "transformers bf16 eager": "transformers BF16",
}
WORKS = {
    "prefill 512, batch 1": "prefill 512",
    "decode, batch 1, context 128": "decode b1",
    "decode, batch 1, context 1024": "b1 at 1024",
    "decode, batch 8, context 128": "b8",
    "decode, batch 16, context 128": "b16",
    "decode, batch 32, context 128": "b32",
    "prefill 512 at depth 1024": "prefill 512 at 1024",
}
# Models, and how the README calls them.
MODELS = {
    report.DEMO: "SmolLM2-135M",
    "random weights, 1.1 B Llama shape": "a 1.1 B Llama shape, random weights",
}


def newest(folder: Path, model: str) -> Path | None:
    """Return the newest record of a model that counts."""
    found = [
        path for path in folder.glob("*-cpu-peers*.json") if _counts(records.load(path), model)
    ]
    return max(found, key=lambda path: records.load(path)["date"], default=None)


def _counts(record: Record, model: str) -> bool:
    engines = [engine for engine in record["engines"] if any(engine["tokens_per_second"].values())]
    names = {engine["name"] for engine in engines}
    finished = record.get("complete", True) and not record["quick"]
    has_peer = any(not name.startswith("qinfer") for name in names)
    return finished and record["model"] == model and OWN in names and has_peer


def block(folder: Path) -> str:
    """Return what stands between the markers."""
    parts = []
    for model, name in MODELS.items():
        path = newest(folder, model)
        if path is not None:
            parts += _section(path, name)
    return "\n".join(parts)


def _section(path: Path, name: str) -> list[str]:
    record = records.load(path)
    engines = {engine["name"]: engine for engine in record["engines"]}
    works = [work for work in WORKS if work in {item["name"] for item in record["works"]}]
    rows = [
        [label, *(_median(engines[engine], work) for work in works)]
        for engine, label in LABELS.items()
        if engine in engines
    ]
    ratios = [report.best_ratios(record, engines[OWN], work) for work in works]
    rows.append(["qinfer / best peer of the run", *(spread(ratio) for ratio in ratios)])
    machine = record["machine"]
    page = path.with_suffix(".md").relative_to(README.parent)
    text = (
        f"{name}, {machine['processor']}, {record['threads']} threads, engines alternating in one "
        f"run, tokens/s, medians of {record['rounds']} "
        f"rounds; ratios [lowest-highest] ([all engines, spread, versions, method]({page})):"
    )
    return [
        *textwrap.wrap(text, 110, break_long_words=False, break_on_hyphens=False),
        "",
        *table(["engine", *(WORKS[work] for work in works)], rows),
        "",
    ]


def _median(engine: Record, work: str) -> str:
    rates = engine["tokens_per_second"][work]
    return number(statistics.median(rates)) if rates else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it would")
    args = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"{README} must have each of these lines once: {BEGIN} and {END}")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    wanted = f"{before}{BEGIN}\n\n{block(HERE / 'results')}{END}{after}"
    if not args.check:
        README.write_text(wanted, encoding="utf-8")
    elif text != wanted:
        sys.exit(
            "README's table of speed is not the newest record's: run benchmarks/readme_table.py"
        )


if __name__ == "__main__":
    main()
