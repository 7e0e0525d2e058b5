"""Options that several verbs share; defaults are read from `EngineConfig`, where they are written.

A verb decorated with `engine_options()` receives one argument, `engine: EngineOptions`, in place
of a dozen; `qinfer.cli.loading` turns it and a MODEL into a ready engine.
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO

import click

from qinfer.engine.config import (
    ACTIVATIONS,
    BATCHINGS,
    DEVICES,
    DTYPES,
    GGUF_WEIGHTS,
    LM_HEADS,
    MAX_SPECULATIVE_TOKENS,
    EngineConfig,
    parse_size,
)
from qinfer.engine.params import SamplingParams
from qinfer.errors import ConfigError
from qinfer.schemes import KV_DTYPE_ALIASES, KV_SCHEMES

KV_CACHE_DTYPES = ("auto", *KV_SCHEMES, *KV_DTYPE_ALIASES)
DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(EngineConfig)}

Verb = Callable[..., None]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the shared options said.

    Args:
        config: fields of `EngineConfig`, checked, by name.
        revision: branch, tag or commit of a hub model; None = its default.
    """

    config: dict[str, Any]
    revision: str | None


def model_argument(verb: Verb) -> Verb:
    """Add the argument MODEL: a directory, a hub id or a `.gguf` file."""
    return click.argument("model", metavar="MODEL")(verb)


def engine_options(*, without: Collection[str] = ()) -> Callable[[Verb], Verb]:
    """Add the options of an engine to a verb, which receives them as `engine: EngineOptions`.

    Args:
        without: names of `EngineConfig` fields that the verb has options of its own for.
    """
    names = [name for name in _OPTIONS if name not in without]

    def decorate(verb: Verb) -> Verb:
        @functools.wraps(verb)
        def wrapper(*args: Any, revision: str | None, **kwargs: Any) -> None:
            config = {name: kwargs.pop(name) for name in names}
            EngineConfig(**config)  # a bad combination ends here, before anything is loaded
            verb(*args, engine=EngineOptions(config, revision), **kwargs)

        decorated: Verb = wrapper
        for name in reversed(names):
            decorated = _option(name)(decorated)
        return click.option(
            "--revision", help="Branch, tag or commit of a hub model; its default if not given."
        )(decorated)

    return decorate


def sampling_options(*, max_tokens: int | None) -> Callable[[Verb], Verb]:
    """Add the options of sampling to a verb, which receives them as `params: SamplingParams`.

    Args:
        max_tokens: default of --max-tokens; None = as many as the context has room for.
    """
    rest = "what the context has room for, if not given." if max_tokens is None else _ROOM

    def decorate(verb: Verb) -> Verb:
        @functools.wraps(verb)
        def wrapper(*args: Any, stop: tuple[str, ...], **kwargs: Any) -> None:
            fields = {name: kwargs.pop(name) for name in _SAMPLING}
            room = {"max_tokens": fields.pop("max_tokens")}  # here None has a meaning
            given = {name: value for name, value in fields.items() if value is not None}
            verb(*args, params=SamplingParams(stop=stop, **room, **given), **kwargs)

        decorated: Verb = click.option(
            "--stop",
            multiple=True,
            metavar="TEXT",
            help="Ends the text where it appears. Repeatable.",
        )(wrapper)
        for name, (kind, text) in reversed(_SAMPLING.items()):
            decorated = click.option(
                "--" + name.replace("_", "-"),
                type=kind,
                default=max_tokens if name == "max_tokens" else None,
                show_default=True,
                help=text + rest if name == "max_tokens" else text,
            )(decorated)
        return decorated

    return decorate


def chat_template_option(verb: Verb) -> Verb:
    """Add --chat-template FILE; the verb receives the file's text as `chat_template`."""
    return click.option(
        "--chat-template",
        type=click.File(encoding="utf-8"),
        callback=_read_file,
        help="Jinja file that replaces the model's chat template.",
    )(verb)


def parse_size_option(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> str | None:
    """Check a size such as 8GiB (a click callback) and return it as it was written."""
    if value is not None:
        try:
            parse_size(value)
        except ConfigError as error:
            raise click.BadParameter(str(error), context, parameter) from error
    return value


def parse_integers(
    context: click.Context, parameter: click.Parameter, value: str
) -> tuple[int, ...]:
    """Return the positive integers of text such as `1,4,8` (a click callback)."""
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError as error:
        message = f"{value!r} is no list of integers such as 1,4,8"
        raise click.BadParameter(message, context, parameter) from error
    if min(numbers) < 1:
        raise click.BadParameter(f"{value!r} holds a number below 1", context, parameter)
    return numbers


def check_folder(
    context: click.Context, parameter: click.Parameter, value: Path | None
) -> Path | None:
    """Refuse a file whose folder does not exist (a click callback): before the work, not after."""
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"{value.parent} is no folder", context, parameter)
    return value


def _read_file(
    context: click.Context, parameter: click.Parameter, value: TextIO | None
) -> str | None:
    if value is None:
        return None
    try:
        return value.read()
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{value.name} is no UTF-8 text", context, parameter) from error


_POSITIVE = click.IntRange(min=1)
# field of EngineConfig -> how click reads it; the option is the name with dashes.
_OPTIONS: dict[str, dict[str, Any]] = {
    "device": {
        "type": click.Choice(DEVICES),
        "help": "Where the model runs; auto = the GPU where there is one.",
    },
    "dtype": {
        "type": click.Choice(DTYPES),
        "help": "Type of activations and unquantized weights; auto = the checkpoint's.",
    },
    "kv_cache_dtype": {
        "type": click.Choice(KV_CACHE_DTYPES),
        "help": "How keys and values are stored; auto = as the checkpoint records, else --dtype.",
    },
    "max_model_len": {
        "type": _POSITIVE,
        "help": "Tokens per sequence; what the model allows if not given.",
    },
    "memory": {
        "callback": parse_size_option,
        "metavar": "SIZE",
        "help": "Total for weights, cache and activations, such as 8GiB; "
        "what the device has free if not given.",
    },
    "memory_fraction": {
        "type": click.FloatRange(0, 1, min_open=True),
        "metavar": "PART",
        "help": "The same as a part of all the memory of the device or control group; "
        "instead of --memory.",
    },
    "num_blocks": {
        "type": _POSITIVE,
        "help": "Cache blocks, exactly (of 16 tokens each); instead of --memory.",
    },
    "threads": {
        "type": _POSITIVE,
        "help": "CPU threads; the cores available to the process if not given.",
    },
    "max_num_seqs": {"type": _POSITIVE, "help": "Requests that run at once."},
    "max_queue": {
        "type": click.IntRange(min=0),
        "help": "Requests that may wait beside these; more are refused. Any number if not given.",
    },
    "batching": {
        "type": click.Choice(BATCHINGS),
        "help": "static: a batch runs until its longest text is done, finished slots computing on; "
        "for comparison only.",
    },
    "max_num_batched_tokens": {
        "type": _POSITIVE,
        "help": "Token budget of one step, over all requests.",
    },
    "max_num_mixed_tokens": {
        "type": _POSITIVE,
        "help": "Tokens of prompts in a step in which other requests decode: fewer make the gaps "
        "in their streams shorter.",
    },
    "enable_prefix_caching": {
        "is_flag": True,
        "help": "Reuse the cache blocks of equal prefixes.",
    },
    "seed": {
        "type": int,
        "help": "Of requests that bring none; different each time if not given.",
    },
    "activations": {
        "type": click.Choice(ACTIVATIONS),
        "help": "Inputs of linears: int8 per token in groups of 32 if quantized, bf16 if bf16 and "
        "the CPU has AVX512-BF16; or exact (float32).",
    },
    "lm_head": {
        "type": click.Choice(LM_HEADS),
        "help": "Head in INT8 per row, or as in the model; auto = int8 for quantized models.",
    },
    "gguf_weights": {
        "type": click.Choice(GGUF_WEIGHTS),
        "help": "Of a .gguf file: run its own codes, or dequantize them to bfloat16 first.",
    },
    "speculative": {
        "metavar": "ngram|MODEL",
        "help": "Draft tokens: ngram looks them up in the text, a MODEL of the same tokenizer "
        "guesses them. Never changes a token; no drafts if not given.",
    },
    "num_speculative_tokens": {
        "type": click.IntRange(1, MAX_SPECULATIVE_TOKENS),
        "help": "Tokens of a draft at most.",
    },
}


_ROOM = "if not given, fewer where the context has less room."
# field of SamplingParams -> type and help; ranges belong to SamplingParams.
_SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "Tokens to generate at most; "),
    "temperature": (float, "0 = greedy; the model's generation_config, else 1, if not given."),
    "top_k": (int, "Sample from the k most likely tokens only; 0 = all."),
    "top_p": (float, "Sample from the smallest set whose probability reaches p."),
    "min_p": (float, "Leave out tokens below p times the highest probability."),
    "typical_p": (float, "Sample from the most typical tokens whose probability reaches p."),
    "repetition_penalty": (float, "Above 1 makes tokens that were seen less likely."),
    "presence_penalty": (float, "Taken off tokens that the text holds already, -2 to 2."),
    "frequency_penalty": (float, "The same for each time that it holds them."),
    "seed": (int, "Makes the draw reproducible; different each time if not given."),
}


def _option(name: str) -> Callable[[Verb], Verb]:
    spelling = "--" + name.replace("_", "-")
    if "is_flag" in _OPTIONS[name]:
        spelling += "/--no-" + name.replace("_", "-")
    return click.option(spelling, name, default=DEFAULTS[name], show_default=True, **_OPTIONS[name])
