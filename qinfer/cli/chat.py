"""`qinfer chat`: a conversation at the terminal."""

import click

from qinfer.cli import console
from qinfer.cli.conversation import Conversation
from qinfer.cli.loading import load_llm
from qinfer.cli.options import (
    EngineOptions,
    chat_template_option,
    engine_options,
    model_argument,
    sampling_options,
)
from qinfer.engine.params import SamplingParams


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

    A line is a message; the answer streams. /set changes sampling, /stats shows speed and memory,
    /help lists all commands; Ctrl-C stops an answer. The conversation grows until the context is
    full, which is said, not hidden.

    \b
    Examples:
      qinfer chat MODEL
      qinfer chat MODEL --system "Answer in one sentence." --temperature 0.7 --kv-cache-dtype int8
    """
    with load_llm(model, engine, chat_template=chat_template) as llm:
        console.remark("/exit ends, /help lists the commands, Ctrl-C stops an answer")
        conversation = Conversation(llm, params, system)
        while conversation.take(_read_line()):
            pass


def _read_line() -> str:
    """Return the next message without outer spaces; the end of input is an exit."""
    try:
        text: str = click.prompt(">", prompt_suffix=" ", default="", show_default=False, err=True)
    except click.Abort:
        click.echo()
        return "/exit"
    return text.strip()
