"""One self-contained HTML page: everything inline, light and dark, nothing from the network."""

import base64
from html import escape

from qinfer.report.plots import Plot, evaluation_plots
from qinfer.report.record import EvaluationRecord, RunRecord
from qinfer.report.tables import (
    TextTable,
    context_table,
    evaluation_table,
    method_lines,
    row_label,
    stage_line,
)

STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --faint: #57606a; --line: #d8dee4;
  --page: #ffffff; --stripe: #f6f8fa; --mark: #2f7ed8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --faint: #9da5ae; --line: #3a4048;
  --page: #16191d; --stripe: #1e2227; --mark: #6cb2ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 76rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p, li { max-width: 60rem; } .faint { color: var(--faint); }
.note { border-left: 3px solid var(--mark); padding: .1rem 0 .1rem .8rem; margin: .8rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th, td { padding: .4rem .6rem; text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 600; vertical-align: bottom; white-space: normal; }
th.name, td.name { text-align: left; white-space: nowrap; }
tbody tr:nth-child(even) { background: var(--stripe); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr));
  gap: 1.5rem 2rem; }
figure { margin: 0; } figure img { width: 100%; height: auto; display: block; }
figcaption { color: var(--faint); font-size: .875rem; } figcaption b { color: var(--ink); }
"""


def evaluation_page(record: EvaluationRecord) -> str:
    """Return the page of an evaluation."""
    title = f"Drift, memory and speed against {record.method.baseline}"
    return _page(title, record.environment.created, [], _evaluation_sections(record))


def run_page(run: RunRecord) -> str:
    """Return the page of a recipe run or of the demo."""
    summary = run.quantization
    fallbacks = ", ".join(summary.fallback_modules) or "none"
    made = "reused from a run before" if summary.reused else "made by this run"
    lines = [
        f"{summary.modules} modules of {summary.model} quantized; checkpoint {made}.",
        f"Modules that fell back to rounding: {fallbacks}.",
        stage_line(run),
    ]
    sections = _evaluation_sections(run.evaluation)
    sections.append(_section("Quantization", _paragraphs(lines)))
    return _page(run.title, run.evaluation.environment.created, list(run.notes), sections)


def _evaluation_sections(record: EvaluationRecord) -> list[str]:
    sections = [_section("Figures", _table(evaluation_table(record)))]
    plots = evaluation_plots(record)
    if plots:
        figures = "".join(_figure(plot) for plot in plots)
        sections.append(_section("Plots", f'<div class="plots">{figures}</div>'))
    by_context = context_table(record)
    if len(by_context.columns) > by_context.left:
        sections.append(_section("Mean KLD by tokens of context", _table(by_context)))
    sections.append(_section("Method", _paragraphs(method_lines(record))))
    kernels = [
        f"{row_label(record, row)}: "
        + ", ".join(f"{count} layers on {name}" for name, count in sorted(row.kernels.items()))
        for row in record.rows
        if row.kernels
    ]
    if kernels:
        sections.append(_section("Kernels that ran", _paragraphs(kernels)))
    return sections


def _page(title: str, created: str, notes: list[str], sections: list[str]) -> str:
    remarks = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="faint">qinfer, {escape(created)}</p>\n'
        f"{remarks}\n{''.join(sections)}</body>\n</html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>\n"


def _paragraphs(lines: list[str]) -> str:
    return "\n".join(f'<p class="faint">{escape(line)}</p>' for line in lines)


def _table(table: TextTable) -> str:
    def cells(tag: str, texts: list[str]) -> str:
        return "".join(
            f"<{tag}{' class=name' if index < table.left else ''}>{escape(text)}</{tag}>"
            for index, text in enumerate(texts)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{cells("th", table.columns)}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _figure(plot: Plot) -> str:
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" '
        f'srcset="{_data_uri(plot.dark)}"><img src="{_data_uri(plot.light)}" '
        f'alt="{escape(plot.title)}: {escape(plot.caption)}"></picture>'
        f"<figcaption><b>{escape(plot.title)}.</b> {escape(plot.caption)}</figcaption></figure>\n"
    )


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
