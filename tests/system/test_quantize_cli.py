"""`qinfer quantize` end to end: options, tables, exit codes, and the real model."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_tiny

from qinfer.cli.main import main


def run(*arguments: str | Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command line as the console script does; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["qinfer", "quantize", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    code = caught.value.code
    return code if isinstance(code, int) else 0 if code is None else 1


FAST = ("--samples", "2", "--seq-len", "32", "--group-size", "32")


def test_writes_a_checkpoint_and_shows_the_errors(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calibration = tmp_path / "text.txt"
    calibration.write_text("Some lines.\nOf text.\n" * 20)
    options = ("--calibration", calibration, "--no-act-order", "--kv-cache-dtype", "fp8_e4m3")
    out = tmp_path / "out"
    assert run(tiny_llama, "-o", out, *FAST, *options, monkeypatch=monkeypatch) == 0
    shown = capsys.readouterr().out
    assert "int4 g32 sym" in shown
    assert "down_proj" in shown
    assert "2 samples, 64 tokens of text.txt text; damping" in shown
    assert "0 fallbacks" in shown
    report = json.loads((out / "quantize_report.json").read_text())
    assert report["config"]["act_order"] is False
    config = json.loads((out / "config.json").read_text())
    assert config["qinfer_kv_cache"]["dtype"] == "fp8_e4m3"


def test_dry_run_shows_the_plan_and_writes_nothing(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--dry-run", "--override", "down_proj=bits:8", "--override", "k_proj=skip")
    assert run(tiny_llama, *options, monkeypatch=monkeypatch) == 0
    captured = capsys.readouterr()
    assert "int8 g64 sym" in captured.out
    assert "expected" in captured.out
    assert "2 of 14 modules left unquantized" in captured.err
    assert list(tmp_path.iterdir()) == []


def test_exit_codes_and_messages(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert run(tiny_llama, monkeypatch=monkeypatch) == 2
    assert "Missing option '-o'" in capsys.readouterr().err
    assert run(tiny_llama, "-o", out, "--group-size", "128", monkeypatch=monkeypatch) == 2
    assert "12 of 14 modules do not fit" in capsys.readouterr().err
    assert run(tmp_path / "absent", "-o", out, monkeypatch=monkeypatch) == 3
    capsys.readouterr()
    rtn = ("--algorithm", "rtn", "--group-size", "-1")
    assert run(tiny_llama, "-o", out, *rtn, monkeypatch=monkeypatch) == 0
    capsys.readouterr()
    assert run(out, "-o", tmp_path / "again", monkeypatch=monkeypatch) == 3
    assert "quantized already" in capsys.readouterr().err
    assert run(tiny_llama, "-o", out, monkeypatch=monkeypatch) == 2
    assert "exists already" in capsys.readouterr().err


def test_strict_exits_non_zero_and_keeps_the_work_g02(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_tiny(tmp_path / "source")
    file = source / "model.safetensors"
    silent = {"model.layers.0.self_attn.v_proj.weight": torch.zeros(32, 64)}
    save_file(load_file(file) | silent, file, metadata={"format": "pt"})
    out = tmp_path / "out"
    assert run(source, "-o", out, *FAST, "--strict", monkeypatch=monkeypatch) == 4
    assert "layers.0.self_attn.o_proj: all calibration inputs are zero" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.partial", "source"]
    assert run(source, "-o", out, *FAST, monkeypatch=monkeypatch) == 0
    assert "1 of 14 modules fell back to rounding" in capsys.readouterr().err


def test_experts_are_shown_together_and_under_seen_ones_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny(tmp_path / "source", "mixtral", num_local_experts=6)
    shape = ["--group-size", "32", "--samples", "1", "--seq-len", "64"]
    assert run(source, "-o", tmp_path / "out", *shape, monkeypatch=monkeypatch) == 0
    shown = capsys.readouterr()
    assert shown.out.count("experts.w1") == 1
    assert "of 12 experts saw fewer calibration tokens than they have inputs" in shown.err
    assert "block_sparse_moe.experts.0: " in shown.err
    assert run(source, "--dry-run", *shape, monkeypatch=monkeypatch) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "experts.w2" in line]
    assert line.split()[-1] == "12"
