"""A recipe from model to report, on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest

from qinfer.errors import ConfigError, LimitExceededError
from qinfer.recipe import Recipe
from qinfer.report.record import RunRecord
from qinfer.workflows.recipe_run import run_recipe, summarize


def _recipe(model: Path, **limits: float) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "tiny",
            "description": "For a test.",
            "model": str(model),
            "quantize": {"weights": "int8", "algorithm": "rtn", "group_size": 32},
            "eval": {"kv_cache_dtypes": ["int8"], "window": 48, "num_windows": 2, **limits},
            "bench": {"input_len": 8, "output_len": 4, "concurrency": [1]},
        }
    )


def _engine() -> dict[str, Any]:
    return {"threads": 1, "isolate": False}


def test_checkpoint_and_reports_are_written(tiny_llama: Path, tmp_path: Path) -> None:
    stages: list[str] = []
    out = tmp_path / "run"
    record = run_recipe(
        _recipe(tiny_llama),
        out=out,
        on_progress=lambda *step: stages.append(step[0]),
        **_engine(),
    )
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoint",
        "report.html",
        "report.json",
    ]
    written = RunRecord.from_dict(json.loads((out / "report.json").read_text(encoding="utf-8")))
    assert written == record
    assert record.quantization.modules == 14
    assert record.quantization.fallback_modules == ()
    assert [row.weights for row in record.evaluation.rows] == ["fp32", "int8 g32 sym"]
    assert [stage.name for stage in record.stages] == ["quantize", "evaluate and time"]
    assert record.recipe["quantize"]["weights"] == "int8"
    assert "checkpoint, int8 KV" in stages


def test_a_missed_limit_is_told_after_the_reports(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(LimitExceededError, match="mean KLD"):
        run_recipe(_recipe(tiny_llama, max_kld=0.0), out=out, **_engine())
    assert (out / "report.html").is_file()


def test_a_folder_that_holds_something_is_left_alone(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        run_recipe(_recipe(tiny_llama), out=tmp_path, **_engine())
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_bad_options_end_before_quantizing(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float8"):
        run_recipe(_recipe(tiny_llama), out=tmp_path / "run", dtype="float8", **_engine())
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_without_its_report_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantize_report\.json"):
        summarize("m", tmp_path, reused=True)
    (tmp_path / "quantize_report.json").write_text("{}")
    with pytest.raises(ConfigError, match="fallback_modules"):
        summarize("m", tmp_path, reused=True)
