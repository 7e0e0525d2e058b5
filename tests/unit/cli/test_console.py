"""Tables and progress: nothing is squeezed, dropped or taken for markup."""

import io

import pytest
from rich.console import Console

from qinfer.cli import console

COLUMNS = ["name", *[f"figure {letter}" for letter in "ABCDEFGH"]]
ROWS = [["one [red]", *["123456.78"] * 8], ["two", *["9"] * 8]]


def _terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> io.StringIO:
    stream = io.StringIO()
    terminal = Console(file=stream, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "out", terminal)
    return stream


def test_a_table_too_wide_for_the_terminal_is_cut_between_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = _terminal(monkeypatch, 50)
    console.show_table("Title [x]", COLUMNS, ROWS)
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= 50
    assert text.count("123456.78") == 8
    assert text.count("one [red]") >= 2  # each part repeats the name
    assert text.count("Title [x]") == 1


def test_a_wide_terminal_and_a_pipe_get_one_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = _terminal(monkeypatch, 200)
    console.show_table(None, COLUMNS, ROWS)
    assert stream.getvalue().count("one [red]") == 1
    monkeypatch.undo()
    console.show_table(None, COLUMNS, ROWS)
    assert capsys.readouterr().out.count("one [red]") == 1


def test_progress_goes_to_stderr_and_survives_markup(capsys: pytest.CaptureFixture[str]) -> None:
    with console.Stages() as stages:
        stages.update("quantize [layer]", 1, 3, "error [0.1]")
        stages.update("quantize [layer]", 3, 3)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "quantize [layer]" in captured.err
    assert "3/3" in captured.err


def test_warnings_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    console.warn("speeds [left] out")
    assert capsys.readouterr().err == "warning: speeds [left] out\n"
