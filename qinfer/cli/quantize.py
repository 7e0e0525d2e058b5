"""`qinfer quantize`: weights to fewer bits, with the report of what it cost."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from qinfer.cli import console
from qinfer.cli.quantize_options import parse_optional_size, quantize_options
from qinfer.quant.pipeline import quantize
from qinfer.quant.report import ModuleRow, QuantProgress, QuantReport

_MAX_LISTED = 20


@click.command(short_help="Quantize the weights of a model.")
@click.argument("model", metavar="MODEL")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Directory to write.")
@quantize_options
@click.option(
    "--memory",
    metavar="SIZE",
    callback=parse_optional_size,
    help="Stay below this much memory, such as 2GiB: what does not fit is kept on disk.",
)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; all cores if not given.")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option(
    "--restart", is_flag=True, help="Forget the unfinished work in OUT.partial and start over."
)
@click.option("--dry-run", is_flag=True, help="Show the plan and the expected size, and stop.")
def command(
    model: str, out: Path | None, *, revision: str | None, dry_run: bool, **options: Any
) -> None:
    """Quantize the weights of MODEL (directory, hub id or .gguf file) and write them to OUT.

    OUT is a checkpoint that other engines load too (`--format`). It appears only when it is
    complete, and holds quantize_report.json: error, damping and tokens of every module. Until then
    finished blocks are kept in OUT.partial: after an interruption the same command goes on there.

    \b
    Examples:
      qinfer quantize MODEL -o OUT
      qinfer quantize MODEL -o OUT --weights int8 --group-size -1
      qinfer quantize MODEL -o OUT --asym --group-size 32 --samples 64
      qinfer quantize MODEL -o OUT --override 'down_proj=bits:8' --override 'layers.0.=skip'
      qinfer quantize MODEL -o OUT --target-bits 4.5
      qinfer quantize MODEL -o OUT --format compressed-tensors
      qinfer quantize MODEL --dry-run
    """
    if out is None and not dry_run:
        raise click.UsageError("Missing option '-o' / '--out' (not needed with --dry-run).")
    with console.Stages() as stages:

        def show_progress(step: QuantProgress) -> None:
            stages.update(step.stage, step.done, step.total, _remark(step))

        report = quantize(
            model, out, revision=revision, dry_run=dry_run, on_progress=show_progress, **options
        )
    if dry_run:
        _show_plan(report)
    else:
        _show_result(report)


def _remark(step: QuantProgress) -> str:
    """Return the step's note, or how long the stage still takes."""
    if step.note or not step.seconds_left:
        return step.note
    minutes, seconds = divmod(round(step.seconds_left), 60)
    return f"about {minutes}:{seconds:02d} left"


def _show_plan(report: QuantReport) -> None:
    """Show what would be done, one line per kind of module."""
    kinds = Counter((_kind(row), row.in_features, row.out_features, row.scheme or "unquantized")
                    for row in report.rows)  # fmt: skip
    console.show(
        console.table(
            f"plan: {_form(report)}",
            ["module", "scheme", "in_features", "out_features", "modules"],
            [[kind, scheme, str(i), str(o), str(n)] for (kind, i, o, scheme), n in kinds.items()],
            left=2,
        )
    )
    _show_allocation(report)
    _show_conditioning(report)
    _show_exceptions(report)
    console.show(_sizes(report, "expected"))


def _show_result(report: QuantReport) -> None:
    """Show the error of every module, one line per layer, and what stands out."""
    layers: dict[str, dict[str, list[ModuleRow]]] = {}
    for row in report.rows:
        layer = row.name.removeprefix("model.layers.").partition(".")[0]
        kind = _kind(row).removeprefix("mlp.").removeprefix("self_attn.")
        layers.setdefault(layer, {}).setdefault(kind, []).append(row)
    kinds = list(dict.fromkeys(kind for cells in layers.values() for kind in cells))
    what = "outputs on the calibration text" if report.calibration else "weights"
    console.show(
        console.table(
            f"{_form(report)}: relative squared error of the {what} (R: rounding took over)",
            ["layer", *kinds],
            [
                [layer, *(_cell(cells.get(kind, [])) for kind in kinds)]
                for layer, cells in layers.items()
            ],
        )
    )
    _show_allocation(report)
    _show_conditioning(report)
    _show_exceptions(report)
    _show_under_seen(report)
    console.show(f"mean error {report.mean_error:.5f}; {_effort(report)}")
    console.show(_sizes(report, "written"))
    console.show(
        f"{report.out} in {report.seconds:.1f} s, "
        f"peak memory {console.megabytes(report.peak_rss_bytes)}"
    )


def _form(report: QuantReport) -> str:
    return "bits chosen by module" if report.allocation else report.scheme


def _show_allocation(report: QuantReport) -> None:
    """Show how bits were chosen, if they were, and what that is expected to cost."""
    facts = report.allocation
    if not facts:
        return
    kinds = Counter(unit["chosen"] for unit in facts["units"].values())
    forms = ", ".join(f"{count} x {form}" for form, count in kinds.most_common())
    console.show(
        f"{facts['mean_bits']:.2f} bits per weight, chosen from {facts['tokens']} tokens: {forms}\n"
        f"expected KL divergence of the weights {facts['expected_kld']:.4f}; no other choice is "
        f"expected below {facts['least_possible_kld']:.4f}"
    )


def _show_conditioning(report: QuantReport) -> None:
    """Show what conditioning the keys gained, or why it was left out."""
    facts = report.conditioning
    if "notice" in facts:
        console.warn(str(facts["notice"]))
    elif facts:
        before, after = sum(facts["error_before"]), sum(facts["error_after"])
        console.show(
            f"keys conditioned for the {facts['kv']} cache: squared error of attention on "
            f"{facts['num_tokens']} tokens at {after / before if before else 1:.0%} of what it was"
        )


def _show_exceptions(report: QuantReport) -> None:
    """List modules that were rounded or left as they were, with the reason."""
    for title, rows in (
        ("fell back to rounding", report.fallback_modules),
        ("left unquantized", report.skipped_modules),
    ):
        if not rows:
            continue
        lines = [f"  {row.name}: {row.fallback or row.skipped}" for row in rows[:_MAX_LISTED]]
        if len(rows) > _MAX_LISTED:
            lines.append(f"  and {len(rows) - _MAX_LISTED} more; all are in quantize_report.json")
        console.warn(f"{len(rows)} of {len(report.rows)} modules {title}:\n" + "\n".join(lines))


def _show_under_seen(report: QuantReport) -> None:
    """Warn of experts that too few calibration tokens went through."""
    few = report.under_seen_experts.get("experts", [])
    if few:
        names = [f"  {item['name']}: {item['num_tokens']} tokens" for item in few[:_MAX_LISTED]]
        if len(few) > _MAX_LISTED:
            names.append(f"  and {len(few) - _MAX_LISTED} more; all are in quantize_report.json")
        console.warn(
            f"{len(few)} of {report.under_seen_experts['of']} experts saw fewer calibration tokens "
            "than they have inputs; more samples, or text like that which the model will see, "
            "would reach them:\n" + "\n".join(names)
        )


def _effort(report: QuantReport) -> str:
    """Return what the calibration used, in words."""
    if report.calibration is None:
        return "no calibration"
    facts = report.calibration
    damping = sorted({row.damp_percent for row in report.rows if row.damp_percent is not None})
    return (
        f"{facts['num_samples']} samples, {facts['num_tokens']} tokens of {facts['source']} text; "
        f"damping {', '.join(f'{value:g}' for value in damping) or 'none'}; "
        f"{len(report.fallback_modules)} fallbacks"
    )


def _sizes(report: QuantReport, verb: str) -> str:
    sizes = report.sizes
    line = (
        f"{console.megabytes(sizes.source_bytes)} before, "
        f"{console.megabytes(sizes.output_bytes)} {verb} "
        f"({sizes.output_bytes / sizes.source_bytes:.0%})"
    )
    if sizes.skip_cost_bytes:
        line += f"; shapes that do not fit cost {console.megabytes(sizes.skip_cost_bytes)}"
    return line


def _kind(row: ModuleRow) -> str:
    """Return the module's name inside its block, without the number of an expert."""
    parts = row.name.split(".")
    return ".".join(parts[-2:] if "experts" not in parts else ["experts", parts[-1]])


def _cell(rows: Sequence[ModuleRow]) -> str:
    """Return the error of a module, or the mean over all experts of a layer."""
    errors = [row.error for row in rows if row.error is not None]
    if not errors:
        return "-" if rows else ""
    rounded = " R" if any(row.fallback for row in rows) else ""
    return f"{sum(errors) / len(errors):.5f}{rounded}"
