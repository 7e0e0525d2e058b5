"""`run_recipe`: quantize, evaluate, measure, and write the reports, in one go."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from qinfer.errors import ConfigError
from qinfer.quant.pipeline import quantize
from qinfer.quant.report import REPORT_NAME
from qinfer.recipe import Recipe
from qinfer.report.html import run_page
from qinfer.report.jsonio import dump_json, load_json, write_atomic
from qinfer.report.record import QuantizationSummary, RunRecord, Stage
from qinfer.workflows.evaluation import EvaluationOptions, evaluate
from qinfer.workflows.gates import require_within
from qinfer.workflows.progress import OnProgress, ignore
from qinfer.workflows.row import SpeedOptions

CHECKPOINT = "checkpoint"
REPORT_JSON = "report.json"
REPORT_HTML = "report.html"
_KEPT = frozenset({"num_modules", "fallback_modules", "mean_error"})
Result = TypeVar("Result")


@dataclass(slots=True)
class Clock:
    """Takes the time of stages, one after the other."""

    stages: list[Stage] = field(default_factory=list)

    def time(self, name: str, work: Callable[[], Result]) -> Result:
        """Do `work` and note how long it took."""
        started = time.monotonic()
        result = work()
        self.stages.append(Stage(name=name, seconds=time.monotonic() - started))
        return result


def run_recipe(
    recipe: Recipe,
    *,
    out: Path,
    model: str | Path | None = None,
    on_progress: OnProgress | None = None,
    **engine: Any,
) -> RunRecord:
    """Quantize a model as a recipe says, measure the result, and write both reports.

    OUT receives `checkpoint/`, `report.json` and `report.html`. The reports are written before
    the recipe's limits are checked, so that a missed limit can be looked into.

    Args:
        recipe: what to do.
        out: a folder that does not exist yet, or is empty.
        model: another model than the recipe's own.
        on_progress: called with (stage, done, total, note).
        engine: `device`, `dtype`, `threads`, `memory` and `revision` of `EvaluationOptions`.

    Raises:
        ConfigError: `out` holds something, or an option cannot work.
        LimitExceededError: a row is over a limit of the recipe.
        QinferError: what quantizing and evaluating raise.
    """
    report = on_progress or ignore
    source = recipe.model if model is None else model
    options = evaluation_options(recipe) | engine
    EvaluationOptions(**options)  # a bad combination ends here, before hours of quantizing
    _prepare(out)
    clock = Clock()
    clock.time("quantize", lambda: _quantize(recipe, source, out, report, engine))
    evaluation = clock.time(
        "evaluate and time",
        lambda: evaluate([out / CHECKPOINT], baseline=source, on_progress=report, **options),
    )
    record = RunRecord(
        title=f"Recipe {recipe.name}: {recipe.description}",
        notes=(),
        stages=tuple(clock.stages),
        quantization=summarize(str(source), out / CHECKPOINT, reused=False),
        evaluation=evaluation,
        recipe=recipe.model_dump(mode="json"),
    )
    write_reports(record, out)
    require_within(evaluation, max_drift=recipe.eval.max_drift, max_kld=recipe.eval.max_kld)
    return record


def evaluation_options(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of `EvaluationOptions` that a recipe sets."""
    section = recipe.eval
    return {
        "kv_cache_dtypes": section.kv_cache_dtypes,
        "baseline_kv_cache_dtype": section.baseline_kv_cache_dtype,
        "baseline_dtype": section.baseline_dtype,
        "text": None if section.text is None else Path(section.text),
        "window": section.window,
        "stride": section.stride,
        "num_windows": section.num_windows,
        "speed": SpeedOptions(**recipe.bench.model_dump()),
    }


def summarize(model: str, checkpoint: Path, *, reused: bool) -> QuantizationSummary:
    """Return what a run's record keeps of quantizing, from the report that the checkpoint keeps.

    Args:
        model: what was quantized.
        checkpoint: the result.
        reused: it was there before the run.

    Raises:
        ConfigError: the checkpoint's report is missing or not what this version writes.
    """
    path = checkpoint / REPORT_NAME
    kept = load_json(path)
    if not isinstance(kept, dict) or not kept.keys() >= _KEPT:
        raise ConfigError(f"{path} is no report of quantizing; it lacks {', '.join(sorted(_KEPT))}")
    return QuantizationSummary(
        model=Path(model).name or model,
        output=checkpoint.name,
        reused=reused,
        modules=kept["num_modules"],
        fallback_modules=tuple(entry["name"] for entry in kept["fallback_modules"]["modules"]),
        mean_relative_error=kept["mean_error"],
    )


def write_reports(record: RunRecord, out: Path) -> None:
    """Write `report.json` and `report.html`, each complete or not at all."""
    write_atomic(out / REPORT_JSON, dump_json(record.to_dict()))
    write_atomic(out / REPORT_HTML, run_page(record))


def _quantize(
    recipe: Recipe, model: str | Path, out: Path, report: OnProgress, engine: dict[str, Any]
) -> None:
    if engine.get("threads") is not None:
        torch.set_num_threads(engine["threads"])
    options = recipe.quantize.model_dump(exclude_none=True)
    quantize(
        model,
        out / CHECKPOINT,
        revision=engine.get("revision"),
        on_progress=lambda step: report(step.stage, step.done, step.total, step.note),
        **options,
    )


def _prepare(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; choose another folder or remove it")
    out.mkdir(parents=True, exist_ok=True)
