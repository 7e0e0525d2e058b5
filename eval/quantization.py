"""Our quantization beside that of others, each by its own tool, all measured by one method.

    PYTHONPATH=benchmarks python eval/quantization.py --texts FOLDER           # everything
    PYTHONPATH=benchmarks python eval/quantization.py --texts FOLDER --only "INT4 g64" Q4_0

FOLDER holds `wiki_calib.txt` and `wiki_heldout.txt`, or what --calibration and --text name. A peer
runs in an environment of its own (`benchmarks/peers/environments.py`), made on first use.
Checkpoints and environments are kept in the cache and used again, ours too: `--again` makes ours
anew, `--all-again` the peers' as well. What is measured is merged into the record of the day.
"""

import argparse
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import records
from comparison import making, outliers, page, scoring
from comparison.making import MakingError, Setup
from comparison.rows import EXACT, OUTLIERS, QWEN, RANDOM_1B, ROWS, SMOLLM2, TARGETS, Row
from peers import random_model
from peers.environments import UnavailableError
from peers.machine import describe_machine, describe_qinfer
from torch import Tensor

from qinfer.checkpoint.hub import demo_model, resolve_model
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import QinferError
from qinfer.formats.weight import QuantizedWeight
from qinfer.models.config import ModelConfig, linear_shapes
from qinfer.quality.report import checkpoint_sha256

HERE = Path(__file__).parent
QWEN_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
OURS = ("qinfer", "condition")


@dataclass(frozen=True, slots=True)
class Model:
    """An unquantized model.

    Args:
        path: its directory.
        ruler: the same function, whose scores are the baseline.
        gguf: the file that it comes from.
    """

    path: Path
    ruler: Path
    gguf: Path | None = None


def find_model(name: str, args: argparse.Namespace) -> Model:
    """Return a model, made first where it can be made.

    Raises:
        UnavailableError: it cannot be had here.
    """
    return _MODELS[name](args)


def _smollm2(_: argparse.Namespace) -> Model:
    source = demo_model()
    path = resolve_model(source)
    return Model(path, path, Path(source) if str(source).endswith(".gguf") else None)


def _outliers(args: argparse.Namespace) -> Model:
    source = _smollm2(args).path
    path = args.work / "outliers"
    if not path.exists():
        outliers.plant(source, path)
    return Model(path, source)


def _qwen(args: argparse.Namespace) -> Model:
    if args.qwen is None:
        raise UnavailableError("--qwen did not name the GGUF file")
    digest = hashlib.sha256()
    with args.qwen.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    if digest.hexdigest() != QWEN_SHA256:
        raise UnavailableError(f"{args.qwen} is not the file meant (sha256 {digest.hexdigest()})")
    path = resolve_model(args.qwen)
    return Model(path, path)


def _random_1b(args: argparse.Namespace) -> Model:
    path = args.cache / "random-1.1b"
    random_model.make(random_model.LLAMA_1B, path, path.with_name("random-1.1b.gguf"))
    return Model(path, path)


_MODELS: dict[str, Callable[[argparse.Namespace], Model]] = {
    SMOLLM2: _smollm2,
    OUTLIERS: _outliers,
    QWEN: _qwen,
    RANDOM_1B: _random_1b,
}


def run_row(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """Make and measure one row.

    Raises:
        UnavailableError: what it needs is not there.
        MakingError: the tool failed.
        QinferError: the checkpoint cannot be read.
    """
    model = find_model(row.model, args)
    setup = Setup(
        source=model.path,
        gguf=model.gguf,
        calibration=args.calibration,
        num_samples=args.samples,
        seq_len=args.seq_len,
        threads=args.threads,
        cache=args.cache,
        work=args.work,
        install=not args.no_install,
    )
    again = args.all_again or (args.again and row.tool in OURS)
    path, made = making.make(row, setup, again=again)
    checkpoint = open_checkpoint(path)
    entry: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": describe_qinfer(HERE.parent)["commit"],
        "model": row.model,
        "made": made,
        "bytes": checkpoint.total_bytes,
    }
    if row.engine is None:
        return entry
    print(f"measuring {row.name} ...", flush=True)
    num_tokens = min(args.tokens, row.tokens)
    ruler = scoring.make_ruler(model.ruler, args.text, num_tokens, EXACT, args.work)
    return entry | {
        "bits_per_weight": bits_per_weight(path),
        "checkpoint_sha256": checkpoint_sha256(path),
        "baseline": ruler.facts,
        "measured": scoring.measure(path, ruler, row.engine),
    }


def bits_per_weight(path: Path) -> float:
    """Return the bits of the linears' codes, scales and zero points per weight."""
    checkpoint = open_checkpoint(path)
    bits = weights = 0
    for name, shape in linear_shapes(ModelConfig.from_dict(checkpoint.config)).items():
        in_features, out_features = shape
        weight = checkpoint.weight(name, in_features=in_features, out_features=out_features)
        weights += in_features * out_features
        if isinstance(weight, Tensor):
            bits += 8 * weight.nbytes
        elif isinstance(weight, QuantizedWeight):
            bits += weight.scheme.bits * weight.codes.numel() + 16 * weight.scales.numel()
            bits += 0 if weight.zeros is None else weight.scheme.bits * weight.zeros.numel()
            bits += 0 if weight.offsets is None else 16 * weight.offsets.numel()
        else:
            raise TypeError(f"{name}: the bits of {type(weight).__name__} are not counted here")
    return bits / weights


def open_record(args: argparse.Namespace) -> tuple[tuple[Path, Path], dict[str, Any]]:
    """Return the files of the day and what they hold, or an empty record."""
    args.out.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    stem = args.out / f"{now[:10]}-quantization"
    files = (stem.with_suffix(".json"), stem.with_suffix(".md"))
    method = {
        "calibration": args.calibration.name,
        "samples": args.samples,
        "seq_len": args.seq_len,
        "text": args.text.name,
        "tokens": args.tokens,
    }
    if files[0].exists():
        record = records.load(files[0])
        if record["method"] != method:
            raise SystemExit(f"{files[0]} was measured by another method: {record['method']}")
        return files, record
    return files, {
        "format_version": 1,
        "date": now,
        "machine": describe_machine(),
        "method": method,
        "rows": {},
        "absent": {},
    }


def run(args: argparse.Namespace) -> str:
    """Do the rows that are wanted, write the record after each, and return its page."""
    open_record(args)  # refuses another method before anything is made
    names = {row.name for row in ROWS}
    wanted = [
        row
        for row in ROWS
        if any(row.name == part or (part not in names and part in row.name)
               for part in args.only or [""])
    ]  # fmt: skip
    if not wanted:
        raise SystemExit(f"no row is called so; there are: {', '.join(row.name for row in ROWS)}")
    text = ""
    for row in wanted:
        entry, reason = None, ""
        try:
            entry = run_row(row, args)
        except (UnavailableError, MakingError, QinferError) as error:
            reason = str(error)
            print(f"absent: {row.name}: {reason}", flush=True)
        text = _merge(row.name, entry, reason, args)
    return text


def _merge(name: str, entry: dict[str, Any] | None, reason: str, args: argparse.Namespace) -> str:
    """Put a row, or why there is none, into the record as it is now; return the page."""
    files, record = open_record(args)
    if entry is None:
        record["absent"][name] = reason
    else:
        record["rows"][name] = entry
        record["absent"].pop(name, None)
    record["targets"] = [page.judge(record, target) for target in TARGETS]
    text: str = page.markdown(record)
    records.write(files, record, text)
    return text


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = Path.home() / ".cache" / "qinfer-peers"
    parser.add_argument("--texts", type=Path, default=Path(), help="folder of the two texts")
    parser.add_argument("--calibration", type=Path, help="text to calibrate on")
    parser.add_argument("--text", type=Path, help="text to measure on")
    parser.add_argument("--tokens", type=int, default=20000, help="of the text that is measured on")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of each")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of rows, or parts of them")
    parser.add_argument("--again", action="store_true", help="make our checkpoints anew")
    parser.add_argument("--all-again", action="store_true", help="make all checkpoints anew")
    parser.add_argument("--qwen", type=Path, help="GGUF file of Qwen2.5-Coder-0.5B-Instruct")
    parser.add_argument("--threads", type=int, default=2, help="of the tools")
    parser.add_argument("--cache", type=Path, default=cache, help="environments and checkpoints")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the record")
    parser.add_argument("--no-install", action="store_true", help="use environments that are there")
    args = parser.parse_args()
    args.calibration = args.calibration or args.texts / "wiki_calib.txt"
    args.text = args.text or args.texts / "wiki_heldout.txt"
    args.cache = args.cache.expanduser().resolve()
    args.work = args.cache / "quantization"
    args.work.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    print(run(parse_args()))


if __name__ == "__main__":
    main()
