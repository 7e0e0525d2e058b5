"""`qinfer eval`: quality, memory and speed side by side, and a gate with an exit code."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from qinfer.bench.record import require_same_method as require_same_speed_method
from qinfer.cli import console
from qinfer.cli.options import (
    KV_CACHE_DTYPES,
    EngineOptions,
    check_folder,
    engine_options,
    parse_integers,
)
from qinfer.errors import MethodMismatchError
from qinfer.report.html import evaluation_page
from qinfer.report.jsonio import dump_json, load_json, write_atomic
from qinfer.report.record import EvaluationRecord
from qinfer.report.tables import evaluation_table, method_lines
from qinfer.workflows.evaluation import EvaluationOptions, evaluate
from qinfer.workflows.gates import require_within
from qinfer.workflows.row import SpeedOptions

_POSITIVE = click.IntRange(min=1)
# Settings of the engine that evaluating decides itself.
OWN_OPTIONS = {
    "kv_cache_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_mixed_tokens",
    "max_queue",
    "batching",
    "memory_fraction",
    "num_blocks",
    "enable_prefix_caching",
    "seed",
    "speculative",
    "num_speculative_tokens",
}


def _parse_kv_cache_dtypes(
    context: click.Context, parameter: click.Parameter, value: str
) -> tuple[str, ...]:
    names = tuple(part.strip() for part in value.split(","))
    for name in names:
        if name not in KV_CACHE_DTYPES:
            known = ", ".join(KV_CACHE_DTYPES)
            raise click.BadParameter(f"{name!r} is none of {known}", context, parameter)
    return names


def _parse_num_windows(
    context: click.Context, parameter: click.Parameter, value: str
) -> int | None:
    if value == "all":
        return None
    if not value.isdecimal() or int(value) < 1:
        message = f"{value!r} is neither all nor a positive number"
        raise click.BadParameter(message, context, parameter)
    return int(value)


@click.command(
    short_help="Measure perplexity, KL divergence and agreement beside memory and speed."
)
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option(
    "--baseline",
    required=True,
    metavar="MODEL",
    help="What drift and divergence refer to; usually the unquantized model.",
)
@click.option(
    "--kv-cache-dtype",
    "kv_cache_dtypes",
    default="auto",
    show_default=True,
    metavar="A,B,…",
    callback=_parse_kv_cache_dtypes,
    help=f"KV types that each MODEL is measured with: {', '.join(KV_CACHE_DTYPES)}.",
)
@click.option(
    "--baseline-kv-cache-dtype",
    type=click.Choice(KV_CACHE_DTYPES),
    default="auto",
    show_default=True,
    help="KV type of the baseline.",
)
@click.option(
    "--baseline-dtype",
    type=click.Choice(("auto", "float32", "bfloat16", "float16")),
    help="Type of the baseline's activations and weights; as --dtype if not given.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="UTF-8 text to score; Wikipedia articles in the package if not given.",
)
@click.option(
    "--window", type=_POSITIVE, default=512, show_default=True, help="Tokens seen at once."
)
@click.option(
    "--stride",
    type=_POSITIVE,
    help="Tokens from one window's start to the next; a whole window if not given.",
)
@click.option(
    "--num-windows",
    default="16",
    show_default=True,
    metavar="N|all",
    callback=_parse_num_windows,
    help="Windows to score, from the start of the text.",
)
@click.option("--add-bos", is_flag=True, help="Put the BOS token in front of every window.")
@click.option("--speed/--no-speed", default=True, show_default=True, help="Time requests too.")
@click.option(
    "--input-len", type=_POSITIVE, default=128, show_default=True, help="Timed: prompt tokens."
)
@click.option(
    "--output-len",
    type=click.IntRange(min=2),
    default=32,
    show_default=True,
    help="Timed: generated tokens.",
)
@click.option(
    "--concurrency",
    default="1,4",
    show_default=True,
    callback=parse_integers,
    metavar="N,N,…",
    help="Timed: requests at once.",
)
@click.option("--max-drift", type=float, metavar="PCT", help="Fail above this drift in percent.")
@click.option(
    "--max-kld", type=click.FloatRange(min=0), metavar="X", help="Fail above this mean KLD."
)
@click.option(
    "--compare",
    "earlier_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Show the rows of an earlier record beside; refused if it was measured differently.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=check_folder,
    help="Write the record: figures, method, machine.",
)
@click.option(
    "--html",
    "html_file",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=check_folder,
    help="Write a page with table and plots.",
)
@engine_options(without=OWN_OPTIONS)
def command(
    models: tuple[str, ...],
    *,
    engine: EngineOptions,
    earlier_file: Path | None,
    json_file: Path | None,
    html_file: Path | None,
    **options: Any,
) -> None:
    """Measure each MODEL with each KV type against a baseline, one row for each.

    Perplexity, its drift, KL divergence and top-1 agreement come from the path that serves: same
    kernels, scheduler and paged cache. Each row runs in a process of its own, so its peak memory
    is its own. Figures taken by different methods are never compared.

    \b
    Examples:
      qinfer eval OUT --baseline MODEL
      qinfer eval MODEL OUT --baseline MODEL --kv-cache-dtype fp16,int8,fp8 --html report.html
      qinfer eval OUT --baseline MODEL --text book.txt --window 2048 --num-windows all --no-speed
      qinfer eval OUT --baseline MODEL --max-drift 1 --max-kld 0.01   # exit code 8 if not kept
      qinfer eval OUT --baseline MODEL --compare yesterday.json
    """
    earlier = None if earlier_file is None else EvaluationRecord.from_dict(load_json(earlier_file))
    limits = {name: options.pop(name) for name in ("max_drift", "max_kld")}
    timed = SpeedOptions(
        **{name: options.pop(name) for name in ("input_len", "output_len", "concurrency")}
    )
    options["speed"] = timed if options.pop("speed") else None
    options |= engine.config | {"revision": engine.revision}
    if earlier is not None:
        options["same_method_as"] = earlier.method
    baseline = options.pop("baseline")
    EvaluationOptions(**options)  # a bad combination ends here, before the progress bars
    with console.Stages() as stages:
        record = evaluate(models, baseline=baseline, on_progress=stages.update, **options)
    show_evaluation(record, earlier)
    if json_file is not None:
        write_atomic(json_file, dump_json(record.to_dict()))
    if html_file is not None:
        write_atomic(html_file, evaluation_page(record))
    require_within(record, **limits)


def show_evaluation(record: EvaluationRecord, earlier: EvaluationRecord | None = None) -> None:
    """Print the table of an evaluation and how its figures were taken.

    Args:
        record: what was measured.
        earlier: a record of the same method, whose rows are shown below.
    """
    shown = record if earlier is None else _with_earlier(record, earlier)
    table = evaluation_table(shown)
    console.show_table(None, table.columns, table.rows, left=table.left)
    for line in method_lines(record):
        console.show(line)


def _with_earlier(record: EvaluationRecord, earlier: EvaluationRecord) -> EvaluationRecord:
    """Return a record with the rows of an earlier one added, its speeds if they are comparable."""
    rows = [row for row in earlier.rows if not row.baseline]
    try:
        require_same_speed_method(
            record.speed_method or {},
            earlier.speed_method or {},
            record.environment,
            earlier.environment,
        )
    except MethodMismatchError as error:
        console.warn(f"the speeds of the earlier record are left out: {error}")
        rows = [replace(row, speed=()) for row in rows]
    named = [replace(row, model=f"{row.model} (earlier)") for row in rows]
    return replace(record, rows=(*record.rows, *named))
