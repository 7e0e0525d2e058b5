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
TIMEOUT = 900
# Loaded right, a checkpoint is nearer to itself elsewhere than to its source, by so much at least.
MARGIN = 10


class FailedError(Exception):
    """A process failed; the message is its last line."""


class Bench:
    """The folder of a run: the source model, its tokens, and what is made of it."""

    def __init__(self, folder: Path, cache: Path, *, install: bool) -> None:
        self.folder, self.cache, self.install = folder, cache, install
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.source = write_tiny(folder / "source", dtype=torch.bfloat16, **TINY)
        generator = torch.Generator().manual_seed(0)

        def draw(name: str, count: int, length: int) -> list[list[int]]:
            ids = torch.randint(0, 256, (count, length), generator=generator).tolist()
            (folder / name).write_text(json.dumps(ids), encoding="utf-8")
            return ids

        self.tokens = draw("tokens.json", SEQUENCES, LENGTH)
        draw("calibration.json", CALIBRATION_WINDOWS, CALIBRATION_LENGTH)
        self.unquantized = self.ours(self.source, EXACT)

    def ours(self, checkpoint: Path, engine: dict[str, str]) -> torch.Tensor:
        """Return qinfer's log-probabilities `[rows, vocab]` of all positions but the last."""
        rows: dict[tuple[int, int], torch.Tensor] = {}

        def keep(sequence: int, position: int, values: torch.Tensor) -> None:
            rows[sequence, position] = values.clone()

        with LLM(checkpoint, device="cpu", max_model_len=LENGTH, **engine) as llm:
            llm.score(self.tokens, keep)
        return torch.cat([rows[key] for key in sorted(rows)])

    def theirs(self, peer: Peer, checkpoint: Path) -> torch.Tensor:
        """Return the same of another engine.

        Raises:
            UnavailableError: it cannot be installed.
            FailedError: it failed.
        """
        out = self.folder / "logits.safetensors"
        out.unlink(missing_ok=True)
        command = [str(PROCESSES / peer.script), str(checkpoint), str(self.folder / "tokens.json")]
        log = f"{checkpoint.name}-{peer.script}.log"
        self._run(peer.environment, [*command, str(out), peer.dtype], log, peer.variables)
        logits = load_file(out)
        rows = [logits[str(index)][: LENGTH - 1] for index in range(SEQUENCES)]
        return torch.log_softmax(torch.cat(rows).double(), -1).float()

    def make(self, case: Theirs) -> Path:
        """Let another tool make a checkpoint; raises as `theirs` does."""
        out = self.folder / _file_name(case.name)
        inputs = [str(self.source), str(self.folder / "calibration.json"), str(out)]
        command = [str(case.script), *inputs, json.dumps(case.options)]
        self._run(case.environment, command, f"{out.name}-make.log", ())
        return out

    def _run(
        self, environment: Environment, command: list[str], log: str, variables: tuple[str, ...]
    ) -> None:
        python = ensure(environment, self.cache, install=self.install)
        common = ["OMP_NUM_THREADS=1", "HF_HUB_OFFLINE=1", "GPTQMODEL_CPU_WORKERS=2"]
        path = self.folder / log
        with path.open("wb") as output:
            done = subprocess.run(
                ["env", *common, *variables, python, *command],
                stdout=output,
                stderr=output,
                cwd=self.folder,
                timeout=TIMEOUT,
                check=False,
            )
        if done.returncode:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            words = [line.strip() for line in lines if line.strip()]
            raise FailedError(f"{words[-1][-300:] if words else 'no output'} ({path.name})")


def compare(
    ours: torch.Tensor, theirs: torch.Tensor, unquantized: torch.Tensor, limit: float
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
        "limit": limit,
        "passed": between <= min(limit, quantizing / MARGIN),
    }


def load_ours(bench: Bench, case: Ours, wanted: str) -> list[dict[str, Any]]:
    """Write a checkpoint and let the others load it; one entry per engine."""
    out = bench.folder / _file_name(case.name)
    rows = [_entry("ours", case.name, peer) for peer in case.peers if wanted in peer.name]
    if not rows:
        return []
    try:
        quantize(bench.source, out, num_samples=8, seq_len=128, **case.options)
        ours = bench.ours(out, EXACT | dict(case.engine))
    except (QinferError, TypeError) as error:
        return [row | {"error": f"qinfer: {error}", "passed": False} for row in rows]
    peers = [peer for peer in case.peers if wanted in peer.name]
    return [row | _against(bench, peer, out, ours) for row, peer in zip(rows, peers, strict=True)]


def load_theirs(bench: Bench, case: Theirs) -> dict[str, Any]:
    """Let another tool write a checkpoint, and load it there and here."""
    row = _entry("theirs", case.name, case.peer)
    try:
        out = bench.make(case)
    except UnavailableError as error:
        return row | {"absent": str(error)}
    except FailedError as error:
        return row | {"absent": f"not written: {error}"}
    try:
        ours = bench.ours(out, EXACT | dict(case.engine))
    except QinferError as error:
        return row | {"error": f"qinfer: {error}", "passed": False}
    return row | _against(bench, case.peer, out, ours)


def _against(bench: Bench, peer: Peer, checkpoint: Path, ours: torch.Tensor) -> dict[str, Any]:
    try:
        theirs = bench.theirs(peer, checkpoint)
    except UnavailableError as error:
        return {"absent": str(error)}
    except (FailedError, subprocess.TimeoutExpired) as error:
        return {"error": str(error), "passed": False}
    return compare(ours, theirs, bench.unquantized, peer.limit)


def _entry(direction: str, name: str, peer: Peer) -> dict[str, Any]:
    versions = dict(text.split("==") for text in peer.environment.requirements)
    return {
        "direction": direction,
        "checkpoint": name,
        "engine": peer.name,
        "versions": versions,
        "dtype": peer.dtype,
    }


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in text)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Do the cases that are wanted and return the record."""
    bench = Bench(args.cache / "interop", args.cache, install=not args.no_install)
    rows: list[dict[str, Any]] = []

    def add(new: list[dict[str, Any]]) -> None:
        rows.extend(new)
        for row in new:
            sys.stdout.write(f"{' '.join(_cells(row))}\n")
            sys.stdout.flush()

    for ours in OURS:
        if args.only in ours.name:
            add(load_ours(bench, ours, args.engine))
    for theirs in THEIRS:
        if args.only in theirs.name and args.engine in theirs.peer.name:
            add([load_theirs(bench, theirs)])
    return {
        "format_version": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "qinfer": describe_qinfer(ROOT),
        "rows": rows,
    }


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
    versions = sorted({json.dumps(row["versions"]) for row in record["rows"]})
    lines += ["", "## Versions", ""]
    for text in versions:
        lines.append(
            "- " + ", ".join(f"{name} {version}" for name, version in json.loads(text).items())
        )
    return "\n".join(lines) + "\n"


METHOD = """\
A random Llama (hidden 256, 2 layers, bfloat16), 2 x 96 random tokens; differences are between
log-probabilities of all tokens, KLD in nats per position, qinfer (float32, exact activations,
fp32 cache) against the engine in the dtype named. *KLD of quantizing* is that between qinfer on
the checkpoint and on its unquantized source: a wrongly read checkpoint would differ by more."""


def _cells(row: dict[str, Any]) -> list[str]:
    engine = f"{row['engine']}, {row['dtype']}"
    if "refused" in row:
        return [row["checkpoint"], engine, f"the engine cannot: {row['refused']}", *[""] * 5]
    if "absent" in row:
        return [row["checkpoint"], engine, f"absent: {row['absent']}", *[""] * 5]
    if "error" in row:
        return [row["checkpoint"], engine, f"**failed**: {row['error']}", *[""] * 5]
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
