"""The `qinfer` command: a lazy group that imports a verb only when it is called."""

import io
import sys
from importlib import import_module

import click

from qinfer import __version__, env
from qinfer.errors import QinferError

# verb -> one line of help; the command is `command` in `qinfer.cli.<verb>`.
VERBS = {
    "bench": "Measure TTFT, TPOT and throughput.",
    "chat": "Chat with a model at the terminal.",
    "condition": "Keep outliers out of a quantized KV cache.",
    "convert": "Turn a GGUF file into a normal model directory.",
    "demo": "The whole story on a small real model, in minutes.",
    "eval": "Measure perplexity, KL divergence and agreement beside memory and speed.",
    "generate": "Continue a prompt at the terminal.",
    "inspect": "Tell what a checkpoint is.",
    "quantize": "Quantize the weights of a model to INT4 or INT8.",
    "run": "Run a recipe: quantize, evaluate and measure in one go.",
    "serve": "Serve a model through an OpenAI-compatible API.",
}
_MODULES = {"eval": "evaluate", "run": "recipe"}


class LazyGroup(click.Group):
    """A group whose commands are imported on use, so that `--help` stays instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the verbs in alphabetical order."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """Import the module of a verb and return its command."""
        if cmd_name not in VERBS:
            return None
        module = import_module(f"qinfer.cli.{_MODULES.get(cmd_name, cmd_name)}")
        command = vars(module)["command"]
        if not isinstance(command, click.Command):
            raise TypeError(f"{module.__name__}.command is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        """Write the verbs without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.command(cls=LazyGroup, context_settings={"auto_envvar_prefix": "QINFER"})
@click.version_option(__version__, prog_name="qinfer")
def cli() -> None:
    """Quantize, serve and measure language models on hardware that is too small.

    \b
    Examples:
      qinfer demo
      qinfer quantize MODEL -o OUT --weights int4
      qinfer eval OUT --baseline MODEL --kv-cache-dtype fp16,int8,fp8
      qinfer serve OUT --kv-cache-dtype int8
    """


def main() -> None:
    """Run the command line; errors of qinfer end it with one line and their exit code."""
    env.calm_openmp()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what the terminal cannot spell is escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        cli(standalone_mode=True)
    except QinferError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
