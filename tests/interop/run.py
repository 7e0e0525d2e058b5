"""Our checkpoints in other engines, theirs in qinfer: `make interop`.

A small model (hidden 256, so that every kernel's tiles fit) is quantized by qinfer and by the
others, each tool in a virtual environment of its own (`benchmarks/peers/environments.py`, made on
first use). Every checkpoint is loaded by an engine that knows its format and by qinfer, and both
must predict the same: the mean KL divergence between them stays below what the engine's arithmetic
explains, and far below what quantizing changed. Ends with status 1 if a comparison failed.
"""

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import records
import torch
from interop.cases import OURS, PROCESSES, THEIRS, Ours, Peer, Theirs
from peers.environments import Environment, UnavailableError, ensure
from peers.machine import describe_machine, describe_qinfer
from safetensors.torch import load_file
from support.checkpoints import write_tiny
from tables import table

from qinfer import LLM, quantize
from qinfer.errors import QinferError
from qinfer.quality.divergence import agreement_rows, kl_rows

ROOT = Path(__file__).parents[2]
EXACT = {"dtype": "float32", "activations": "exact", "lm_head": "model", "kv_cache_dtype": "fp32"}
TINY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
SEQUENCES, LENGTH = 2, 96
CALIBRATION_WINDOWS, CALIBRATION_LENGTH = 8, 128
VERSIONS = ("versions", "written_with")  # of a row: who loads it, who wrote it
MAX_REASON = 240  # characters, in the table; the record has them all


class Bench:
    """The folder of a run: the source model, its tokens, and what is made of it."""

    def __init__(self, folder: Path, cache: Path, *, install: bool) -> None:
        self.folder, self.cache, self.install = folder, cache, install
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.source = write_tiny(folder / "source", dtype=torch.bfloat16, **TINY)
        generator = torch.Generator().manual_seed(0)

        def draw(name: str, count: int, length: int) -> list[list[int]]:
            ids: list[list[int]] = torch.randint(
                0, 256, (count, length), generator=generator
            ).tolist()
            (folder / name).write_text(json.dumps(ids), encoding="utf-8")
            return ids

        self.tokens = draw("tokens.json", SEQUENCES, LENGTH)
        draw("calibration.json", CALIBRATION_WINDOWS, CALIBRATION_LENGTH)
        self.unquantized = self.predict(self.source)

    def predict(self, checkpoint: Path) -> torch.Tensor:
        """Return qinfer's log-probabilities `[rows, vocab]` of all positions but the last."""
        rows: dict[tuple[int, int], torch.Tensor] = {}

        def keep(sequence: int, position: int, values: torch.Tensor) -> None:
            rows[sequence, position] = values.clone()

        with LLM(checkpoint, device="cpu", max_model_len=LENGTH, **EXACT) as llm:
            llm.score(self.tokens, keep)
        return torch.cat([rows[key] for key in sorted(rows)])

    def run(
        self,
        environment: Environment,
        script: Path,
        tasks: list[list[str]],
        variables: tuple[str, ...] = (),
    ) -> list[str | None]:
        """Run a script's tasks in an environment; return why each failed, or None.

        Raises:
            UnavailableError: the environment cannot be made.
        """
        python = ensure(environment, self.cache, install=self.install)
        stem = f"{environment.name}-{script.stem}"
        log, inputs, results = (
            self.folder / f"{stem}.{ending}" for ending in ("log", "tasks.json", "results.json")
        )
        inputs.write_text(json.dumps(tasks), encoding="utf-8")
        common = ["OMP_NUM_THREADS=1", "HF_HUB_OFFLINE=1", "GPTQMODEL_CPU_WORKERS=2"]
        command = [python, str(PROCESSES / "many.py"), str(script), str(inputs), str(results)]
        with log.open("wb") as output:
            done = subprocess.run(
                ["env", *common, *variables, *command],
                stdout=output,
                stderr=output,
                cwd=self.folder,
                check=False,
            )
        found: list[str | None] = []
        if results.exists():
            found = json.loads(results.read_text(encoding="utf-8"))
        rest = len(tasks) - len(found)
        return found + [f"the process died ({done.returncode}); see {log}"] * rest


@dataclass(slots=True)
class Job:
    """A checkpoint that an engine has to load.

    Args:
        row: of the record.
        peer: the engine.
        checkpoint: where it lies.
        ours: what qinfer predicts with it.
        refused: part of the engine's reason why it cannot run it, if it cannot.
    """

    row: dict[str, Any]
    peer: Peer
    checkpoint: Path
    ours: torch.Tensor
    refused: str | None = None


def compare(
    ours: torch.Tensor, theirs: torch.Tensor, unquantized: torch.Tensor, peer: Peer
) -> dict[str, Any]:
    """Return how far apart two engines' distributions of one checkpoint are, with the verdict."""
    between = float(kl_rows(ours, theirs).mean())
    quantizing = float(kl_rows(unquantized, ours).mean())
    return {
        "kld": between,
        "kld_of_quantizing": quantizing,
        "max_difference": float((ours - theirs).abs().max()),
        "mean_difference": float((ours - theirs).abs().mean()),
        "top1_agreement": float(agreement_rows(ours, theirs).float().mean()),
        "limit": min(peer.limit, quantizing / peer.margin),
        "passed": between <= min(peer.limit, quantizing / peer.margin),
    }


def write_ours(bench: Bench, case: Ours, wanted: str) -> list[Job | dict[str, Any]]:
    """Write a checkpoint; return a job for each engine, or a row for each that says what failed."""
    out = bench.folder / _file_name(case.name)
    peers = [peer for peer in case.peers if wanted in peer.name]
    rows = [_entry("ours", case.name, peer) for peer in peers]
    if not peers:
        return []
    try:
        quantize(bench.source, out, num_samples=8, seq_len=128, **case.options)
        ours = bench.predict(out)
    except QinferError as error:
        return [row | {"error": f"qinfer: {error}", "passed": False} for row in rows]
    return [
        Job(row, peer, out, ours, case.refused.get(peer.name))
        for row, peer in zip(rows, peers, strict=True)
    ]


def write_theirs(bench: Bench, cases: list[Theirs]) -> list[Job | dict[str, Any]]:
    """Let other tools write checkpoints; return a job for each, or a row that says what failed."""
    results: list[Job | dict[str, Any]] = []
    for script in dict.fromkeys(case.script for case in cases):
        group = [case for case in cases if case.script == script]
        outs = [bench.folder / _file_name(case.name) for case in group]
        inputs = [str(bench.source), str(bench.folder / "calibration.json")]
        tasks = [
            [*inputs, str(out), json.dumps(case.options)]
            for case, out in zip(group, outs, strict=True)
        ]
        try:
            errors = bench.run(group[0].environment, script, tasks)
        except UnavailableError as error:
            errors = [str(error)] * len(group)
        for case, out, failed in zip(group, outs, errors, strict=True):
            row = _entry("theirs", case.name, case.peer)
            row["written_with"] = _versions(case.environment)
            if failed is not None:
                results.append(row | {"absent": f"not written: {failed}"})
                continue
            try:
                results.append(Job(row, case.peer, out, bench.predict(out)))
            except QinferError as error:
                results.append(row | {"error": f"qinfer: {error}", "passed": False})
    return results


def load_all(bench: Bench, jobs: list[Job]) -> None:
    """Let one engine load its checkpoints, and put what came out into the jobs' rows."""
    peer = jobs[0].peer
    outs = [bench.folder / f"{job.checkpoint.name}-{peer.environment.name}.out" for job in jobs]
    tokens = str(bench.folder / "tokens.json")
    tasks = [
        [str(job.checkpoint), tokens, str(out), peer.dtype]
        for job, out in zip(jobs, outs, strict=True)
    ]
    try:
        errors = bench.run(peer.environment, PROCESSES / peer.script, tasks, peer.variables)
    except UnavailableError as error:
        for job in jobs:
            job.row["absent"] = str(error)
        return
    for job, out, failed in zip(jobs, outs, errors, strict=True):
        if failed is None:
            job.row.update(compare(job.ours, _read(out), bench.unquantized, job.peer))
        elif job.refused is not None and job.refused in failed:
            job.row["refused"] = failed
        else:
            job.row.update(error=failed, passed=False)


def _read(out: Path) -> torch.Tensor:
    logits = load_file(out)
    rows = [logits[str(index)][: LENGTH - 1] for index in range(SEQUENCES)]
    return torch.log_softmax(torch.cat(rows).double(), -1).float()


def _entry(direction: str, name: str, peer: Peer) -> dict[str, Any]:
    return {
        "direction": direction,
        "checkpoint": name,
        "engine": peer.name,
        "versions": _versions(peer.environment),
        "dtype": peer.dtype,
    }


def _versions(environment: Environment) -> dict[str, str]:
    """Return the versions that the environment pins."""
    return dict(text.split("==") for text in environment.requirements)


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in text)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Do the cases that are wanted and return the record."""
    bench = Bench(args.cache / "interop", args.cache, install=not args.no_install)
    results: list[Job | dict[str, Any]] = []
    for case in OURS:
        if args.only in case.name:
            _say(f"writing {case.name} ...")
            results += write_ours(bench, case, args.engine)
    theirs = [c for c in THEIRS if args.only in c.name and args.engine in c.peer.name]
    _say(f"letting others write {len(theirs)} checkpoints ...")
    results += write_theirs(bench, theirs)
    jobs = [result for result in results if isinstance(result, Job)]
    for peer in dict.fromkeys(job.peer for job in jobs):
        _say(f"loading in {peer.name}, {peer.dtype} ...")
        load_all(bench, [job for job in jobs if job.peer == peer])
    return {
        "format_version": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "qinfer": describe_qinfer(ROOT),
        "rows": [result.row if isinstance(result, Job) else result for result in results],
    }


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def markdown(record: dict[str, Any]) -> str:
    """Return the page of a record."""
    head = ["checkpoint", "engine", "result", "KLD", "KLD of quantizing", "max", "mean", "top-1 %"]
    lines = [
        f"# Checkpoints between engines, {record['date'][:10]}",
        "",
        f"qinfer {record['qinfer']['version']}, commit {record['qinfer']['commit']}. {METHOD}",
    ]
    for direction, title in (("ours", "Ours in other engines"), ("theirs", "Theirs in qinfer")):
        rows = [row for row in record["rows"] if row["direction"] == direction]
        lines += ["", f"## {title}", "", *table(head, [_cells(row) for row in rows])]
    environments = [row[key] for row in record["rows"] for key in VERSIONS if key in row]
    texts = {", ".join(" ".join(pair) for pair in versions.items()) for versions in environments}
    lines += ["", "## Versions", "", *(f"- {text}" for text in sorted(texts))]
    return "\n".join(lines) + "\n"


METHOD = """\
A random Llama (hidden 256, 2 layers, bfloat16), 2 x 96 random tokens; differences are between
log-probabilities of all tokens, KLD in nats per position, qinfer (float32, exact activations,
fp32 cache) against the engine in the dtype named. *KLD of quantizing* is that between qinfer on
the checkpoint and on its unquantized source: a wrongly read checkpoint would differ by more."""


_WITHOUT_FIGURES = {
    "refused": "the engine cannot",
    "absent": "absent",
    "error": "**failed**",
}


def _cells(row: dict[str, Any]) -> list[str]:
    engine = f"{row['engine']}, {row['dtype']}"
    for key, title in _WITHOUT_FIGURES.items():
        if key in row:
            reason = " ".join(row[key].split())[:MAX_REASON]
            return [row["checkpoint"], engine, f"{title}: {reason}", *[""] * 5]
    names = ("kld", "kld_of_quantizing", "max_difference", "mean_difference")
    figures = [f"{row[name]:.2g}" for name in names]
    result = "agrees" if row["passed"] else "**differs**"
    return [row["checkpoint"], engine, result, *figures, f"{100 * row['top1_agreement']:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = Path.home() / ".cache" / "qinfer-peers"
    parser.add_argument("--cache", type=Path, default=cache, help="environments and checkpoints")
    parser.add_argument("--out", type=Path, default=ROOT / "eval" / "results")
    parser.add_argument("--only", default="", help="part of the checkpoints' names")
    parser.add_argument("--engine", default="", help="part of the engine's name")
    parser.add_argument("--no-install", action="store_true", help="use environments that are there")
    args = parser.parse_args()
    args.cache = args.cache.expanduser().resolve()
    record = run(args)
    page = markdown(record)
    sys.stdout.write(page)
    if not args.only and not args.engine:
        args.out.mkdir(parents=True, exist_ok=True)
        stem = args.out / f"{record['date'][:10]}-interop"
        records.write((stem.with_suffix(".json"), stem.with_suffix(".md")), record, page)
    sys.exit(any(row.get("passed") is False for row in record["rows"]))


if __name__ == "__main__":
    main()
