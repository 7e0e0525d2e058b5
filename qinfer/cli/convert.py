"""`qinfer convert`: a GGUF file, or weights in pickles, as a normal model directory."""

from pathlib import Path

import click

from qinfer.checkpoint.convert import convert_model
from qinfer.checkpoint.hub import resolve_model
from qinfer.cli import console


@click.command(short_help="Turn a GGUF file into a normal model directory.")
@click.argument("model", metavar="MODEL")
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="Directory to write."
)
@click.option(
    "--allow-pickle",
    is_flag=True,
    help="Read pytorch_model.bin where there are no safetensors (tensors only, no code).",
)
@click.option("--revision", help="Branch, tag or commit of a hub model.")
def command(model: str, out: Path, *, allow_pickle: bool, revision: str | None) -> None:
    """Write MODEL (.gguf file, directory or hub id) to OUT as safetensors.

    Weights of a GGUF file are dequantized to bfloat16; its tokenizer, chat template and
    end-of-text tokens are carried over. Other weights keep their type and are copied as they are.
    """
    is_gguf = Path(model).suffix == ".gguf"
    source = Path(model).expanduser() if is_gguf else resolve_model(model, revision=revision)
    with console.Stages() as stages:
        convert_model(
            source,
            out,
            allow_pickle=allow_pickle,
            on_progress=lambda done, total: stages.update("tensors", done, total),
        )
    console.show(f"{out}")
