"""`qinfer condition` end to end: table, record, exit codes, and the real model."""

import json
import sys
from pathlib import Path

import pytest
import torch
from support.checkpoints import edit_json, write_tiny
from support.outliers import plant_outliers

from qinfer.cli.main import main
from qinfer.quant.condition_run import condition
from qinfer.quant.conditioner import RECORD_NAME
from qinfer.workflows.evaluation import evaluate

FAST = ("--samples", "1", "--seq-len", "64")


def run(*arguments: str | Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command line as the console script does; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["qinfer", "condition", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    code = caught.value.code
    return code if isinstance(code, int) else 0 if code is None else 1


def test_shows_every_layer_and_writes_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_tiny(tmp_path / "model", "qwen2")
    plant_outliers(source)
    text = tmp_path / "text.txt"
    text.write_text("Some lines.\nOf text.\n" * 20)
    out, file = tmp_path / "out", tmp_path / "record.json"
    options = ("-o", out, "--calibration", text, "--json", file)
    assert run(source, *options, *FAST, monkeypatch=monkeypatch) == 0
    captured = capsys.readouterr()
    lines = [line.split() for line in captured.out.splitlines()]
    record = json.loads(file.read_text())
    for number, layer in enumerate(record["layers"]):
        row = next(cells for cells in lines if cells[:1] == [str(number)])
        before = sum(layer["error_before"]) / sum(layer["energy"])
        assert f"{before:.3g}" in row
        assert sum(int(cell) for cell in row[1:-3]) == 2  # kv heads
    assert "64 tokens of text.txt text" in captured.out
    assert record["calibration"]["source"] == "text.txt"
    kept = json.loads((out / RECORD_NAME).read_text())
    assert {key: record[key] for key in kept} == kept
    assert run(out, "-o", tmp_path / "again", *FAST, monkeypatch=monkeypatch) == 0
    assert "had been conditioned before" in capsys.readouterr().err


def test_factors_that_were_held_back_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_tiny(tmp_path / "model", dtype=torch.float16)
    plant_outliers(source)
    assert run(source, "-o", tmp_path / "out", *FAST, monkeypatch=monkeypatch) == 0
    assert "pairs were held back by a number format" in capsys.readouterr().err


def test_refusals_end_with_their_exit_codes(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(tiny_llama, "-o", tmp_path, monkeypatch=monkeypatch) == 2
    assert "exists already" in capsys.readouterr().err
    source = write_tiny(tmp_path / "model")
    edit_json(source / "config.json", kv_lora_rank=64)
    assert run(source, "-o", tmp_path / "out", monkeypatch=monkeypatch) == 3
    assert "MLA" in capsys.readouterr().err


@pytest.mark.slow
def test_the_real_model_gets_better_keys(smollm2: Path, tmp_path: Path) -> None:
    """No head gets worse on the calibration tokens; on unseen text an INT8 cache costs less."""
    report = condition(smollm2, tmp_path / "out", num_samples=1)
    for layer in report.record.layers:
        pairs = zip(layer.error_after, layer.error_before, strict=True)
        assert all(after <= before for after, before in pairs)
        assert layer.num_clamped == 0
    record = evaluate(
        [smollm2, report.out],
        baseline=smollm2,
        baseline_kv_cache_dtype="fp32",
        kv_cache_dtypes=["int8"],
        window=512,
        num_windows=4,
        dtype="float32",
        threads=1,
        speed=None,
        isolate=False,
    )
    plain, conditioned = (row.divergence.mean for row in record.rows if not row.baseline)
    assert conditioned < 0.85 * plain
    assert conditioned < 0.0006
