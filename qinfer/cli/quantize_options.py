"""The options that say how to quantize: one for every field of `QuantizeConfig`."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click

from qinfer.engine.config import parse_size
from qinfer.errors import ConfigError
from qinfer.quant.config import (
    ALGORITHMS,
    CONDITIONING,
    FORMATS,
    INPUT_ACTIVATIONS,
    KV_CACHE_DTYPES,
    MISFIT_POLICIES,
    SCALE_SEARCHES,
    WEIGHTS,
    QuantizeConfig,
)

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(QuantizeConfig)}
_POSITIVE = click.IntRange(min=1)

Verb = Callable[..., None]


def quantize_options(verb: Verb) -> Verb:
    """Add an option for every field of `QuantizeConfig`, under the field's name."""
    for option in reversed(_OPTIONS):
        verb = option(verb)
    return verb


def parse_optional_size(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    """Read a size such as `90MB` or `2GiB` as bytes."""
    if value is None:
        return None
    try:
        return parse_size(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def _parse_group_size(_: click.Context, __: click.Parameter, value: str) -> int | str:
    if value == "auto":
        return value
    try:
        return int(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is neither auto nor a number") from error


_OPTIONS: tuple[Callable[[Verb], Verb], ...] = (
    click.option(
        "--weights",
        type=click.Choice(tuple(WEIGHTS)),
        default=DEFAULTS["weights"],
        show_default=True,
        help="Width of a weight.",
    ),
    click.option(
        "--algorithm",
        type=click.Choice(ALGORITHMS),
        default=DEFAULTS["algorithm"],
        show_default=True,
        help="gptq is calibrated on text; rtn rounds to nearest; bnb-* round as bitsandbytes does.",
    ),
    click.option(
        "--group-size",
        metavar="auto|N|-1",
        default=DEFAULTS["group_size"],
        show_default=True,
        callback=_parse_group_size,
        help="Inputs that share a scale; -1 = all; auto = the largest of 128, 64, 32 that fits.",
    ),
    click.option(
        "--asym", is_flag=True, help="Store zero points (GPTQ v2) instead of a symmetric grid."
    ),
    click.option(
        "--act-order/--no-act-order",
        default=DEFAULTS["act_order"],
        show_default=True,
        help="gptq: take columns by descending Hessian diagonal, in static groups.",
    ),
    click.option(
        "--damp-percent",
        type=click.FloatRange(0, 1),
        default=DEFAULTS["damp_percent"],
        show_default=True,
        help="Share of the mean Hessian diagonal that is added to it.",
    ),
    click.option(
        "--scale-search",
        type=click.Choice(SCALE_SEARCHES),
        default=DEFAULTS["scale_search"],
        show_default=True,
        help="A group's scale covers its range, or has the least error of the weights or outputs.",
    ),
    click.option(
        "--gptaq/--no-gptaq",
        default=DEFAULTS["gptaq"],
        show_default=True,
        help="gptq: calibrate against the inputs of the unquantized model too.",
    ),
    click.option(
        "--gptaq-samples",
        type=_POSITIVE,
        default=DEFAULTS["gptaq_samples"],
        show_default=True,
        help="Calibration windows, the first ones, that run through the unquantized model too.",
    ),
    click.option(
        "--target-bits",
        type=click.FloatRange(2, 16),
        help="Mean bits per weight, scales included: bits and groups are chosen module by module.",
    ),
    click.option(
        "--target-size",
        metavar="SIZE",
        callback=parse_optional_size,
        help="The same as a size of all tensors of the checkpoint, such as 90MB.",
    ),
    click.option(
        "--override",
        "overrides",
        multiple=True,
        metavar="REGEX=SETTINGS",
        help="Modules whose name REGEX finds get bits:N and/or group_size:N, or skip. Repeatable; "
        "the first that matches counts.",
    ),
    click.option(
        "--format",
        type=click.Choice(FORMATS),
        default=DEFAULTS["format"],
        show_default=True,
        help="Format of the checkpoint; other engines load both.",
    ),
    click.option(
        "--input-activations",
        type=click.Choice(INPUT_ACTIVATIONS),
        default=DEFAULTS["input_activations"],
        show_default=True,
        help="int8 records W8A8 (compressed-tensors, int8 weights per channel).",
    ),
    click.option(
        "--calibration",
        metavar="TEXT",
        help="What to calibrate on: a UTF-8 text file, a .jsonl of conversations or texts, or "
        "hf:DATASET[:CONFIG[:SPLIT[:COLUMN]]]; a novel and articles in the package if not given.",
    ),
    click.option(
        "--samples",
        "num_samples",
        type=_POSITIVE,
        default=DEFAULTS["num_samples"],
        show_default=True,
        help="Calibration windows.",
    ),
    click.option(
        "--seq-len",
        type=_POSITIVE,
        default=DEFAULTS["seq_len"],
        show_default=True,
        help="Tokens per calibration window.",
    ),
    click.option(
        "--kv-cache-dtype",
        type=click.Choice(KV_CACHE_DTYPES),
        default=DEFAULTS["kv_cache_dtype"],
        show_default=True,
        help="KV cache type recorded for serving.",
    ),
    click.option(
        "--condition-kv",
        type=click.Choice(CONDITIONING),
        default=DEFAULTS["condition_kv"],
        show_default=True,
        help="Fold factors into q and k that keep outliers out of a quantized KV cache.",
    ),
    click.option(
        "--on-misfit",
        type=click.Choice(MISFIT_POLICIES),
        default=DEFAULTS["on_misfit"],
        show_default=True,
        help="Shapes that the format cannot carry: refuse the model, or leave them unquantized.",
    ),
    click.option("--strict", is_flag=True, help="Fail if a module falls back to rounding."),
)
