"""`qinfer condition`: fold factors into q and k that keep outliers out of a quantized KV cache."""

from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from qinfer.cli import console
from qinfer.quant.condition_run import ConditionOptions, ConditionReport, condition
from qinfer.quant.conditioner import RECORD_NAME, SEARCH_TOKENS, SEARCH_WINDOWS, choice_label
from qinfer.quant.conditioning import CHOICES
from qinfer.report.jsonio import dump_json, write_atomic

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(ConditionOptions)}


@click.command(short_help="Keep outliers out of a quantized KV cache.")
@click.argument("model", metavar="MODEL")
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="Directory to write."
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(("int8", "fp8_e4m3", "fp8")),
    help="KV type to condition for and to record; the recorded one if not given, else int8.",
)
@click.option(
    "--calibration",
    metavar="TEXT",
    help="What to calibrate on, as for qinfer quantize; text in the package if not given.",
)
@click.option(
    "--samples",
    "num_samples",
    type=click.IntRange(1, SEARCH_WINDOWS),
    default=_DEFAULTS["num_samples"],
    show_default=True,
    help="Calibration windows.",
)
@click.option(
    "--seq-len",
    type=click.IntRange(1, SEARCH_TOKENS),
    default=_DEFAULTS["seq_len"],
    show_default=True,
    help="Tokens per calibration window.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write factors and errors of every head.",
)
@click.option("--revision", help="Branch, tag or commit of a hub model.")
def command(
    model: str, out: Path, *, json_file: Path | None, revision: str | None, **options: Any
) -> None:
    """Condition the keys of MODEL (directory, hub id or .gguf file) and write it to OUT.

    Rotary pairs of keys are divided by powers of two and those of queries multiplied, folded into
    weights, scales, biases or norms: the model computes the same, and an INT8 cache stores its
    keys with less error. MODEL may be quantized. All other tensors keep their bytes.

    \b
    Examples:
      qinfer condition MODEL -o OUT
      qinfer condition MODEL-GPTQ-Int4 -o OUT --calibration my.txt
    """
    with console.Stages() as stages:
        report = condition(
            model,
            out,
            revision=revision,
            on_layer=lambda done, total, note: stages.update("condition", done, total, note),
            **options,
        )
    _show(report)
    if json_file is not None:
        write_atomic(json_file, dump_json(report.to_dict()))


def _show(report: ConditionReport) -> None:
    """Show a line per layer: what was chosen, and the errors before and after."""
    record = report.record
    rows = []
    for number, layer in enumerate(record.layers):
        counts = Counter(layer.choices)
        chosen = [str(counts[choice]) if counts[choice] else "" for choice in CHOICES]
        before, after = layer.relative_before, layer.relative_after
        rows.append([str(number), *chosen, f"{before:.3g}", f"{after:.3g}", _ratio(before, after)])
    console.show_table(
        f"heads by alpha[/beta], and relative squared errors of attention with {record.kv} keys",
        [
            "layer",
            *map(choice_label, CHOICES),
            "error before",
            "error after",
            "ratio",
        ],
        rows,
    )
    held = sum(layer.num_clamped for layer in record.layers)
    if held:
        pairs = sum(len(row) for layer in record.layers for row in layer.exponents)
        console.warn(f"the factors of {held} of {pairs} pairs were held back by a number format")
    if report.repeated:
        console.remark("MODEL had been conditioned before; the errors are relative to that")
    console.show(
        f"{report.out} for {record.kv} keys, from {record.num_tokens} tokens of "
        f"{report.calibration['source']} text, in {report.seconds:.1f} s; all factors are in "
        f"{RECORD_NAME}"
    )


def _ratio(before: float, after: float) -> str:
    return f"{after / before:.2f}" if before > 0 else "-"
