"""`qinfer convert`: another file format of the same model, as a normal model directory."""

from pathlib import Path

import click

from qinfer.checkpoint.convert import convert_format, convert_model
from qinfer.checkpoint.hub import resolve_model
from qinfer.checkpoint.transcode import Conversion
from qinfer.cli import console
from qinfer.errors import ConfigError
from qinfer.formats.output import FORMATS

_VERSIONS = {"v1": "gptq", "v2": "gptq_v2"}
_EPILOG = """\b
Examples:
  qinfer convert model.gguf -o model
  qinfer convert model-gptq -o model-ct --format compressed-tensors
  qinfer convert model-awq -o model-gptq --format gptq --gptq-version v2
"""


@click.command(short_help="Turn a model into another file format.", epilog=_EPILOG)
@click.argument("model", metavar="MODEL")
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="Directory to write."
)
@click.option(
    "--format",
    "name",
    type=click.Choice(FORMATS),
    help="Write the quantized weights in this format, without loss: afterwards both are read, "
    "dequantized and compared bit for bit.",
)
@click.option(
    "--gptq-version",
    type=click.Choice(list(_VERSIONS)),
    help="With --format gptq: how zero points are stored; v1 if all weights are symmetric.",
)
@click.option(
    "--allow-pickle",
    is_flag=True,
    help="Read pytorch_model.bin where there are no safetensors (tensors only, no code).",
)
@click.option("--revision", help="Branch, tag or commit of a hub model.")
def command(
    model: str,
    out: Path,
    *,
    name: str | None,
    gptq_version: str | None,
    allow_pickle: bool,
    revision: str | None,
) -> None:
    """Write MODEL (.gguf file, directory or hub id) to OUT as safetensors.

    Without --format, weights of a GGUF file are dequantized to bfloat16; its tokenizer, chat
    template and end-of-text tokens are carried over. Other weights keep their type and are copied
    as they are.

    With --format, quantized weights (GPTQ, compressed-tensors, AWQ, GGUF) are written in another
    format. Where that cannot carry them exactly, the reasons are listed, nothing is written, and
    the exit code is 4.
    """
    if gptq_version is not None and name != "gptq":
        raise ConfigError("--gptq-version is about --format gptq")
    is_gguf = Path(model).suffix == ".gguf"
    source = Path(model).expanduser() if is_gguf else resolve_model(model, revision=revision)
    conversion: Conversion | None = None
    with console.Stages() as stages:
        if name is None:
            convert_model(
                source,
                out,
                allow_pickle=allow_pickle,
                on_progress=lambda done, total: stages.update("tensors", done, total),
            )
        else:
            conversion = convert_format(
                source,
                out,
                name=name,
                version=_VERSIONS[gptq_version] if gptq_version else None,
                allow_pickle=allow_pickle,
                on_progress=stages.update,
            )
    if conversion is not None:
        _show(conversion)
    console.show(f"{out}")


def _show(conversion: Conversion) -> None:
    console.show(
        f"{conversion.source_format} to {conversion.target_format}: {conversion.equal} of "
        f"{conversion.modules} modules equal bit for bit, worst difference "
        f"{conversion.worst_difference:g}; {conversion.copied_tensors} other tensors unchanged"
    )
    if conversion.left_out:
        console.show(
            f"left out, as {conversion.target_format} has no place for them: "
            f"{len(conversion.left_out)} scales of activations, such as {conversion.left_out[0]}"
        )
