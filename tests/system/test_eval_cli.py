"""`qinfer eval` and `qinfer run` from the command line: table, reports, gate, exit codes."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from qinfer.cli.main import cli
from qinfer.errors import QinferError
from qinfer.report.record import EvaluationRecord, RunRecord

EVAL = ["--window", "48", "--num-windows", "2", "--threads", "1"]
TIMED = ["--input-len", "8", "--output-len", "4", "--concurrency", "1"]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    stdout: str
    stderr: str


def _qinfer(*arguments: str | Path, code: int = 0) -> Ended:
    """Run a command in this process; an error of qinfer ends it as `main` would end it."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    error = result.exception
    if isinstance(error, QinferError):
        assert error.exit_code == code
        return Ended(result.stdout, f"{result.stderr}error: {error}")
    if error is not None and not isinstance(error, SystemExit):
        raise error
    assert result.exit_code == code, result.stderr
    return Ended(result.stdout, result.stderr)


@pytest.fixture(scope="module")
def record_file(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of {fp32, int8 KV}, with the page beside it; the table is checked on the way."""
    folder = tmp_path_factory.mktemp("eval")
    result = _qinfer(
        "eval", tiny_llama, "--baseline", tiny_llama, "--kv-cache-dtype", "int8", *EVAL, *TIMED,
        "--json", folder / "eval.json", "--html", folder / "eval.html",
    )  # fmt: skip
    assert "baseline" in result.stdout
    assert "int8" in result.stdout
    assert "tok/s" in result.stdout
    assert "2 windows of 48" in result.stdout
    return folder / "eval.json"


def test_json_and_page(record_file: Path) -> None:
    record = EvaluationRecord.from_dict(json.loads(record_file.read_text(encoding="utf-8")))
    assert [row.kv_cache_dtype for row in record.rows] == ["fp32", "int8"]
    for row in record.rows:
        assert row.memory.process_peak_bytes is not None
        assert row.memory.process_peak_bytes > row.memory.weights_bytes
        assert row.speed[0].output_tokens_per_second > 0
    page = record_file.with_suffix(".html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert record_file.stat().st_mode & 0o777 == 0o644


def test_gates_end_with_their_exit_code_after_writing(tiny_llama: Path, tmp_path: Path) -> None:
    """In a process of its own, as a script would run it."""
    arguments = [
        "eval", str(tiny_llama), "--baseline", str(tiny_llama), "--kv-cache-dtype", "int8", *EVAL,
        "--no-speed", "--max-kld", "0", "--json", str(tmp_path / "eval.json"),
    ]  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", "from qinfer.cli.main import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 8, result.stderr
    assert "limits exceeded" in result.stderr
    assert "int8 KV: mean KLD" in result.stderr
    assert "Traceback" not in result.stderr
    assert "int8" in result.stdout
    assert (tmp_path / "eval.json").is_file()


def test_b04_an_earlier_record_of_another_method_is_refused(
    tiny_llama: Path, record_file: Path
) -> None:
    """B04: `--compare` shows rows of the same method and refuses all others."""
    same = _qinfer(
        "eval", tiny_llama, "--baseline", tiny_llama, *EVAL, "--no-speed", "--compare", record_file
    )
    assert "(earlier)" in same.stdout
    assert "speeds of the earlier record are left out" in same.stderr
    other = _qinfer(
        "eval", tiny_llama, "--baseline", tiny_llama, "--window", "40", "--num-windows", "2",
        "--no-speed", "--compare", record_file, code=7,
    )  # fmt: skip
    assert "window (48 / 40)" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-dtype", "int8,int3"], "int3"),
        (["--num-windows", "0"], "neither all nor a positive number"),
        (["--window", "16", "--stride", "17"], "stride 17"),
        (["--json", "no-such-folder/eval.json"], "no-such-folder"),
        (["--compare", "no-such-record.json"], "no-such-record.json"),
    ],
)
def test_wrong_options_end_at_once_with_one_line(
    tiny_llama: Path, arguments: list[str], message: str
) -> None:
    result = _qinfer("eval", tiny_llama, "--baseline", tiny_llama, *arguments, code=2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_recipe_from_file_to_report(tiny_llama: Path, tmp_path: Path) -> None:
    recipe = {
        "name": "tiny",
        "description": "For a test.",
        "model": "no-such/model",
        "quantize": {"weights": "int8", "algorithm": "rtn", "group_size": 32},
        "eval": {"window": 48, "num_windows": 2},
        "bench": {"input_len": 8, "output_len": 4, "concurrency": [1]},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    out = tmp_path / "out"
    result = _qinfer("run", path, "--model", tiny_llama, "-o", out, "--threads", "1")
    assert "int8 g32 sym" in result.stdout
    record = RunRecord.from_dict(json.loads((out / "report.json").read_text(encoding="utf-8")))
    assert record.recipe["name"] == "tiny"
    assert [row.kv_cache_dtype for row in record.evaluation.rows] == ["fp32", "int8"]
    again = _qinfer("run", path, "--model", tiny_llama, "-o", out, code=2)
    assert "not empty" in again.stderr


def test_a_recipe_that_does_not_exist_lists_those_that_do() -> None:
    result = _qinfer("run", "no-such-recipe", code=2)
    assert "smollm2-int4" in result.stderr


@pytest.mark.parametrize("verb", ["eval", "run", "demo"])
def test_help_has_examples(verb: str) -> None:
    text = _qinfer(verb, "--help").stdout
    assert "Examples:" in text
    assert f"qinfer {verb}" in text
