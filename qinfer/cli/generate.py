"""`qinfer generate`: a prompt continued at the terminal."""

import sys
from dataclasses import asdict, replace
from typing import Any

import click
from click.core import ParameterSource

from qinfer.cli.live import stream
from qinfer.cli.loading import load_llm
from qinfer.cli.options import EngineOptions, engine_options, model_argument, sampling_options
from qinfer.engine.llm import LLM
from qinfer.engine.params import SamplingParams
from qinfer.errors import NonFiniteError
from qinfer.report.jsonio import dump_json

OUTPUT_VERSION = 1


@click.command(short_help="Continue a prompt at the terminal.")
@model_argument
@click.argument("prompt", required=False)
@sampling_options(max_tokens=128)
@click.option("--ignore-eos", is_flag=True, help="Go on past the end token.")
@click.option("--json", "as_json", is_flag=True, help="Print text, tokens and times as JSON.")
@engine_options(without={"seed", "max_queue"})
def command(
    model: str,
    *,
    prompt: str | None,
    params: SamplingParams,
    ignore_eos: bool,
    as_json: bool,
    engine: EngineOptions,
) -> None:
    """Continue PROMPT, or standard input, with MODEL (directory, hub id or .gguf file).

    The text is printed as it comes; Ctrl-C stops it. No chat template is applied: for that there
    is `qinfer chat`.

    \b
    Examples:
      qinfer generate MODEL "The capital of France is" --max-tokens 16
      qinfer generate MODEL --temperature 0 --json < prompt.txt
    """
    if prompt is None:
        prompt = _read_stdin()
    params = replace(params, ignore_eos=ignore_eos)
    with load_llm(model, engine) as llm:
        params = _within_room(llm, prompt, params)
        if as_json:
            click.echo(dump_json(_generate(llm, model, prompt, params)), nl=False)
            return
        for event in stream(llm.core, llm.tokenizer.encode(prompt), params):
            click.echo(event.text, nl=False)
        click.echo()


def _within_room(llm: LLM, prompt: str, params: SamplingParams) -> SamplingParams:
    """Return parameters whose `max_tokens`, unless the user gave it, fits the context."""
    source = click.get_current_context().get_parameter_source("max_tokens")
    if source is not ParameterSource.DEFAULT or llm.config.max_model_len is None:
        return params
    room = llm.config.max_model_len - len(llm.tokenizer.encode(prompt))
    return replace(params, max_tokens=None) if (params.max_tokens or 0) > room else params


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise click.UsageError("Missing PROMPT: give it as an argument or on standard input.")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"Standard input is no valid text: {error}.") from error


def _generate(llm: LLM, model: str, prompt: str, params: SamplingParams) -> dict[str, Any]:
    """Return a result as JSON data; times in seconds."""
    result = llm.generate(prompt, params)[0]
    output = result.outputs[0]
    if output.finish_reason == "error":
        raise NonFiniteError(output.error or "the request failed")
    return {
        "kind": "generation",
        "format_version": OUTPUT_VERSION,
        "model": model,
        "prompt": prompt,
        "prompt_token_ids": result.prompt_token_ids,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "metrics": asdict(result.metrics),
    }
