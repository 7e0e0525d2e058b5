"""Plots: drawn in memory, in both themes, the same bytes each time."""

from dataclasses import replace
from xml.etree import ElementTree as ET

from support.records import make_record, make_row

from qinfer.report.plots import evaluation_plots


def test_every_plot_is_svg_in_two_themes() -> None:
    plots = evaluation_plots(make_record())
    assert [plot.title for plot in plots] == [
        "Drift against memory",
        "Drift by length of context",
        "Generated tokens per second",
    ]
    for plot in plots:
        assert plot.light != plot.dark
        for svg in (plot.light, plot.dark):
            assert ET.fromstring(svg).tag.endswith("svg")
            assert "<image" not in svg


def test_equal_records_give_equal_bytes() -> None:
    first, second = (evaluation_plots(make_record()) for _ in range(2))
    assert first == second


def test_only_what_was_measured_is_drawn() -> None:
    record = make_record(make_row(speed=()))
    baseline = replace(record.rows[0], speed=())
    untimed = evaluation_plots(replace(record, rows=(baseline, record.rows[1])))
    assert [plot.title for plot in untimed] == [
        "Drift against memory",
        "Drift by length of context",
    ]
    assert evaluation_plots(replace(record, rows=(baseline,))) == []
