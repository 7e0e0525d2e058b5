"""The HTML page: self-contained, escaped, light and dark."""

import re
from dataclasses import replace
from html.parser import HTMLParser

from support.records import make_record, make_row, make_run

from qinfer.report.html import evaluation_page, run_page

VOID = {"meta", "img", "source"}


class _Checker(HTMLParser):
    """Collects addresses and text, and checks that tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [v or "" for k, v in attrs if k in {"src", "srcset", "href"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def _check(page: str) -> _Checker:
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


def test_nothing_comes_from_elsewhere() -> None:
    page = run_page(make_run())
    checker = _check(page)
    assert checker.addresses
    assert all(address.startswith("data:image/svg+xml;base64,") for address in checker.addresses)
    assert "http" not in re.sub(r"base64,[A-Za-z0-9+/=]*", "", page)
    assert "<script" not in page


def test_both_themes_are_there() -> None:
    page = evaluation_page(make_record())
    assert page.count("prefers-color-scheme: dark") >= 1 + 3  # the style and each plot
    assert "color-scheme: light dark" in page


def test_names_cannot_inject_markup() -> None:
    evil = '<script>alert("x")</script>&amp;'
    record = make_record(make_row(evil, weights=evil))
    record = replace(record, method=replace(record.method, text=evil, baseline=evil))
    page = evaluation_page(record)
    assert "<script" not in page
    assert evil in "".join(_check(page).text)


def test_figures_method_and_remarks_are_on_the_page() -> None:
    text = "".join(_check(run_page(make_run())).text)
    for part in (
        "A remark with <markup> & more.",
        "int4 g64 sym",
        "+4.25",
        "8 windows of 512",
        "reference.packed",
        "210 modules",
        "fell back to rounding: none",
        "150 s in all",
    ):
        assert part in text


def test_a_reused_checkpoint_is_named_as_such() -> None:
    run = make_run()
    assert "made by this run" in run_page(run)
    again = replace(run, quantization=replace(run.quantization, reused=True))
    assert "reused from a run before" in run_page(again)
