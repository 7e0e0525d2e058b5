"""The texts in the package are what their notice says."""

import csv
from importlib.resources import files

import pytest

from qinfer.data.files import calibration_text, demo_prompts, evaluation_text


def test_texts_are_long_enough_for_the_defaults() -> None:
    assert len(calibration_text()) > 490_000
    assert calibration_text().startswith("EMMA")
    assert len(evaluation_text()) > 150_000


def test_texts_do_not_overlap() -> None:
    evaluation = evaluation_text()
    paragraphs = [line for line in calibration_text().splitlines() if len(line) > 40]
    assert not any(line in evaluation for line in paragraphs[::20])


@pytest.mark.parametrize("name", ["calibration_articles.txt", "evaluation.txt"])
def test_every_article_is_attributed(name: str) -> None:
    folder = files("qinfer.data")
    lines = set(folder.joinpath(name).read_text("utf-8").splitlines())
    table = csv.DictReader(folder.joinpath("ATTRIBUTION.csv").read_text("utf-8").splitlines())
    rows = [row for row in table if row["file"] == name]
    notice = folder.joinpath("NOTICE.md").read_text("utf-8")
    assert f"`{name}` | {len(rows)} " in notice
    assert "CC BY-SA" in notice
    assert all(row["title"] in lines and row["url"].endswith(row["id"]) for row in rows)


def test_no_article_serves_both_purposes() -> None:
    rows = csv.DictReader(
        files("qinfer.data").joinpath("ATTRIBUTION.csv").read_text("utf-8").splitlines()
    )
    ids = [row["id"] for row in rows]
    assert len(ids) == len(set(ids))


def test_demo_prompts_are_single_lines() -> None:
    prompts = demo_prompts()
    assert len(prompts) >= 8
    assert all(prompt.strip() == prompt and prompt for prompt in prompts)
