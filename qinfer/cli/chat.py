"""`qinfer chat`: a conversation at the terminal."""

import click

from qinfer.cli import console
from qinfer.cli.live import stream
from qinfer.cli.loading import load_llm
from qinfer.cli.options import (
    EngineOptions,
    chat_template_option,
    engine_options,
    model_argument,
    sampling_options,
)
from qinfer.engine.llm import LLM
from qinfer.engine.params import SamplingParams
from qinfer.errors import RequestError

HELP = "/exit ends, /reset forgets the conversation, Ctrl-C stops an answer"


@click.command(short_help="Chat with a model at the terminal.")
@model_argument
@click.option("--system", help="System message that opens the conversation.")
@chat_template_option
@sampling_options(max_tokens=None)
@engine_options(without={"seed", "max_queue", "batching"})
def command(
    model: str,
    *,
    system: str | None,
    chat_template: str | None,
    params: SamplingParams,
    engine: EngineOptions,
) -> None:
    """Chat with MODEL (directory, hub id or .gguf file) through its chat template.

    A line is a message; the answer streams. /exit ends, /reset forgets the conversation, Ctrl-C
    stops an answer. The conversation grows until the context is full, which is said, not hidden.

    \b
    Examples:
      qinfer chat MODEL
      qinfer chat MODEL --system "Answer in one sentence." --temperature 0.7 --kv-cache-dtype int8
    """
    with load_llm(model, engine, chat_template=chat_template) as llm:
        opening = [] if system is None else [{"role": "system", "content": system}]
        console.remark(HELP)
        _converse(llm, opening, params)


def _converse(llm: LLM, opening: list[dict[str, str]], params: SamplingParams) -> None:
    """Take messages until the end of input; an error costs only the message that caused it."""
    history = list(opening)
    while (line := _read_line()) != "/exit":
        if line == "/reset":
            history = list(opening)
            console.remark("the conversation is forgotten")
        elif line.startswith("/"):
            console.remark(HELP)
        elif line:
            message = {"role": "user", "content": line}
            try:
                answer = _answer(llm, [*history, message], params)
            except RequestError as error:
                console.warn(f"{error} (/reset starts anew)")
                continue
            history += [message, {"role": "assistant", "content": answer}]


def _read_line() -> str:
    """Return the next message without outer spaces; the end of input is an exit."""
    try:
        text: str = click.prompt(">", prompt_suffix=" ", default="", show_default=False, err=True)
    except click.Abort:
        click.echo()
        return "/exit"
    return text.strip()


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Print the answer as it comes, and return it."""
    prompt = llm.tokenizer.apply_chat_template(messages)
    pieces = []
    for event in stream(llm.core, prompt, params):
        pieces.append(event.text)
        click.echo(event.text, nl=False)
    click.echo()
    return "".join(pieces)
