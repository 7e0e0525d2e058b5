"""The JSON schema: what is written is read back equal, and nothing unknown is accepted."""

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from support.records import make_record, make_run

from qinfer.errors import ConfigError
from qinfer.report import record as record_module
from qinfer.report.jsonio import dump_json, load_json, write_atomic
from qinfer.report.record import EvaluationRecord, RunRecord

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "json.md"


def test_round_trip_through_json() -> None:
    record = make_record()
    assert EvaluationRecord.from_dict(json.loads(dump_json(record.to_dict()))) == record
    run = make_run()
    assert RunRecord.from_dict(json.loads(dump_json(run.to_dict()))) == run


def _set(data: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    target: Any = data
    for name in parents:
        target = target[int(name)] if name.isdigit() else target[name]
    target[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format_version", 2, "format_version 2"),
        ("kind", "bench", "evaluation record"),
        ("method.window", "512", "method.window"),
        ("method.bos", 1, "method.bos"),
        ("method.surprise", 1, "surprise"),
        ("rows.0.quality.perplexity", None, r"rows\[0\].quality.perplexity"),
        ("rows.0.quality.drift_interval", [1.0], "drift_interval"),
        ("rows.0.kernels", [], "kernels"),
        ("rows", {}, "rows"),
        ("environment", 3, "environment"),
    ],
)
def test_wrong_records_are_refused_by_field(path: str, value: object, message: str) -> None:
    data = json.loads(dump_json(make_record().to_dict()))
    _set(data, path, value)
    with pytest.raises(ConfigError, match=message):
        EvaluationRecord.from_dict(data)


def test_a_missing_field_is_named() -> None:
    data = json.loads(dump_json(make_record().to_dict()))
    del data["method"]["stride"]
    with pytest.raises(ConfigError, match=r"method.*stride"):
        EvaluationRecord.from_dict(data)


@pytest.mark.parametrize("data", [[], 3, None, {}])
def test_other_json_is_no_record(data: object) -> None:
    with pytest.raises(ConfigError, match="no qinfer evaluation record"):
        EvaluationRecord.from_dict(data)


def test_json_never_holds_nan() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        dump_json({"perplexity": float("nan")})


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json"):
        load_json(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"a": ')
    with pytest.raises(ConfigError, match=r"half\.json"):
        load_json(tmp_path / "half.json")


def refuse(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_writing_replaces_whole_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    write_atomic(path, "one")
    write_atomic(path, "two ‖")
    assert path.read_text(encoding="utf-8") == "two ‖"
    assert path.stat().st_mode & 0o777 == 0o644
    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", refuse)
        with pytest.raises(ConfigError, match=r"report\.json cannot be written: No space left"):
            write_atomic(path, "three")
    assert path.read_text(encoding="utf-8") == "two ‖"
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_a_folder_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"report\.json cannot be written"):
        write_atomic(tmp_path / "none" / "report.json", "x")


def test_every_field_is_documented() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    for name, kind in vars(record_module).items():
        if isinstance(kind, type) and is_dataclass(kind):
            for field in fields(kind):
                assert f"`{field.name}`" in text, f"{name}.{field.name} is not in json.md"
