"""The demo's steps on a tiny model: once, and once more."""

from functools import partial
from pathlib import Path

import pytest
from support.records import make_record

from qinfer.workflows import demo
from qinfer.workflows.demo import run_demo
from qinfer.workflows.evaluation import evaluate
from qinfer.workflows.row import SpeedOptions


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    # In one process: twelve rows in processes of their own would take a minute.
    monkeypatch.setattr(demo, "evaluate", partial(evaluate, isolate=False))
    monkeypatch.setattr(demo, "WINDOW", 48)
    monkeypatch.setattr(demo, "NUM_WINDOWS", 2)
    monkeypatch.setattr(demo, "SPEED", SpeedOptions(input_len=8, output_len=4, concurrency=(1,)))
    monkeypatch.setattr(demo, "QUANTIZE", demo.QUANTIZE | {"num_samples": 2, "seq_len": 64})


def test_all_rows_twice_with_the_checkpoint_reused(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    stages: list[str] = []
    first = run_demo(
        out,
        model=tiny_llama,
        threads=1,
        on_progress=lambda *step: stages.append(step[0]),
    )
    rows = [(row.weights, row.kv_cache_dtype) for row in first.record.evaluation.rows]
    kinds = ("fp16", "int8", "fp8_e4m3")
    models = ("fp32", "int4 g64 sym")
    assert rows == [("fp32", "fp32"), *((w, kv) for w in models for kv in kinds)]
    assert first.record.evaluation.rows[0].baseline
    assert [bool(row.speed) for row in first.record.evaluation.rows] == [False] + 6 * [True]
    assert first.record.evaluation.speed_method is not None
    assert not first.record.quantization.reused
    assert any("training" in note for note in first.record.notes)
    assert "model" in stages
    assert {path.name for path in out.iterdir()} == {
        first.checkpoint.name,
        "report.html",
        "report.json",
    }
    second = run_demo(out, model=tiny_llama, threads=1)
    assert second.checkpoint == first.checkpoint
    assert second.record.quantization.reused
    assert [row.quality for row in second.record.evaluation.rows] == [
        row.quality for row in first.record.evaluation.rows
    ]


def test_other_options_never_reuse(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = demo._key(tiny_llama)
    monkeypatch.setattr(demo, "QUANTIZE", demo.QUANTIZE | {"seq_len": 32})
    assert demo._key(tiny_llama) != before


def test_the_4_bit_grid_of_the_demo_weights_is_told() -> None:
    record = make_record()
    told = demo._notes(record, from_gguf=True)
    assert any("already lie on a 4-bit grid" in note for note in told)
    assert not any("4-bit grid" in note for note in demo._notes(record, from_gguf=False))
