"""Plots of an evaluation as SVG text, drawn in memory; no display and no files."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from qinfer.report.record import EvaluationRecord, EvaluationRow
from qinfer.report.tables import row_label

KV_CONTEXT = 4096  # tokens of KV cache that are counted beside the weights
WIDTH, HEIGHT = 6.4, 3.6  # inches at 72 points
# Distinct for colour-blind readers on white and on black (Okabe and Ito, 2008, adjusted).
COLORS = ("#2f7ed8", "#e07b00", "#1f9d6b", "#b65bb0", "#c44e52", "#7f8c8d")
MARKERS = ("o", "s", "^", "D", "v", "P")


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours that must fit the page behind a plot."""

    text: str
    grid: str


LIGHT = Theme(text="#24292f", grid="#d8dee4")
DARK = Theme(text="#e6e6e6", grid="#3a4048")


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot in both themes, with the sentence that says what it shows."""

    title: str
    caption: str
    light: str
    dark: str


def evaluation_plots(record: EvaluationRecord) -> list[Plot]:
    """Return the plots that the record has figures for."""
    plots = []
    if any(row.divergence.mean > 0 for row in record.rows):
        plots.append(
            _plot(
                "Drift against memory",
                f"Mean KL divergence over resident weights plus a KV cache of {KV_CONTEXT} tokens. "
                "Lower left is better; the dashed line is the baseline's memory.",
                lambda theme: _drift_against_memory(record, theme),
            )
        )
        plots.append(
            _plot(
                "Drift by length of context",
                "Mean KL divergence of the tokens that have so many tokens before them.",
                lambda theme: _drift_by_context(record, theme),
            )
        )
    if any(row.speed for row in record.rows):
        plots.append(
            _plot(
                "Generated tokens per second",
                "Higher is better; one bar for each number of requests at once.",
                lambda theme: _speed_bars(record, theme),
            )
        )
    return plots


def _plot(title: str, caption: str, draw: Callable[[Theme], Figure]) -> Plot:
    return Plot(title, caption, _svg(draw(LIGHT)), _svg(draw(DARK)))


def _svg(figure: Figure) -> str:
    stream = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "qinfer"}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return stream.getvalue()


def _axes(theme: Theme, height: float = HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.tick_params(colors=theme.text, which="both", labelsize=9)
    axes.grid(visible=True, color=theme.grid, linewidth=0.7)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name in {"left", "bottom"})
        spine.set_color(theme.grid)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(theme.text)
        label.set_fontsize(9.5)
    return figure, axes


def _legend(figure: Figure, theme: Theme) -> None:
    figure.legend(
        loc="outside right upper",
        frameon=False,
        labelcolor=theme.text,
        fontsize=8.5,
        handlelength=1.4,
    )


def _styles(rows: Sequence[EvaluationRow]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return colour and marker by (model, KV type): a colour per model, a marker per KV type."""
    models = list(dict.fromkeys(row.model for row in rows))
    types = list(dict.fromkeys(row.kv_cache_dtype for row in rows))
    return {
        (model, kv): (COLORS[i % len(COLORS)], MARKERS[j % len(MARKERS)])
        for i, model in enumerate(models)
        for j, kv in enumerate(types)
    }


def _drift_against_memory(record: EvaluationRecord, theme: Theme) -> Figure:
    figure, axes = _axes(theme)
    styles = _styles(record.rows)
    for row in record.rows:
        color, marker = styles[row.model, row.kv_cache_dtype]
        megabytes = _footprint(row) / 1e6
        if row.baseline:
            axes.axvline(megabytes, color=color, linestyle="--", linewidth=1.2)
        elif row.divergence.mean > 0:
            axes.plot(
                megabytes,
                row.divergence.mean,
                linestyle="none",
                color=color,
                marker=marker,
                markersize=8,
                label=row_label(record, row),
            )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(left=0)
    axes.set_xlabel(f"weights + KV cache of {KV_CONTEXT} tokens, MB")
    axes.set_ylabel("mean KLD, nats per token")
    _legend(figure, theme)
    return figure


def _drift_by_context(record: EvaluationRecord, theme: Theme) -> Figure:
    figure, axes = _axes(theme)
    styles = _styles(record.rows)
    ranges: dict[int, int] = {}
    for row in record.rows:
        if row.divergence.mean == 0:
            continue
        color, marker = styles[row.model, row.kv_cache_dtype]
        parts = row.divergence.by_context
        ranges |= {part.context_from: part.context_to for part in parts}
        axes.plot(
            [part.context_from for part in parts],
            [part.kld_mean for part in parts],
            color=color,
            marker=marker,
            markersize=6,
            linewidth=1.4,
            label=row_label(record, row),
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(FixedLocator(sorted(ranges)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _range(ranges, value)))
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("mean KLD, nats per token")
    _legend(figure, theme)
    return figure


def _speed_bars(record: EvaluationRecord, theme: Theme) -> Figure:
    rows = [row for row in record.rows if row.speed]
    levels = sorted({speed.concurrency for row in rows for speed in row.speed})
    thickness = 0.8 / len(levels)
    figure, axes = _axes(theme, height=0.9 + 0.28 * len(rows) * max(1.3, len(levels)))
    for index, level in enumerate(levels):
        places, values = [], []
        for place, row in enumerate(rows):
            for speed in row.speed:
                if speed.concurrency == level:
                    places.append(place + (index - (len(levels) - 1) / 2) * thickness)
                    values.append(speed.output_tokens_per_second)
        bars = axes.barh(
            places,
            values,
            height=0.92 * thickness,
            color=COLORS[index % len(COLORS)],
            label=f"{level} at once",
        )
        axes.bar_label(bars, fmt="%.0f", padding=3, color=theme.text, fontsize=8.5)
    axes.set_yticks(range(len(rows)), [row_label(record, row) for row in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.08)
    axes.set_xlabel("generated tokens per second")
    _legend(figure, theme)
    return figure


def _footprint(row: EvaluationRow) -> int:
    return row.memory.weights_bytes + KV_CONTEXT * row.memory.kv_bytes_per_token


def _range(ranges: dict[int, int], value: float) -> str:
    low = round(value)
    return f"{low}-{ranges[low]}" if low in ranges else ""
