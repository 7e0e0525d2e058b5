"""Any readable model as a safetensors directory.

As it is (GGUF dequantized), or with its quantized weights in another format.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from qinfer.checkpoint import gguf
from qinfer.checkpoint.durable import refuse_existing, writing
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.checkpoint.transcode import Conversion, transcode
from qinfer.checkpoint.transcode import Progress as StageProgress
from qinfer.checkpoint.writer import DEFAULT_SHARD_BYTES, CheckpointWriter

_SETTINGS_FILE = "quantize_config.json"
_SIDE_FILE_METHODS = {"gptq"}

Progress = Callable[[int, int], None]


def convert_model(
    source: Path,
    out: Path,
    *,
    allow_pickle: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: Progress | None = None,
) -> None:
    """Write the model at `source` as the new directory `out`.

    Args:
        source: a `.gguf` file or a model directory.
        out: appears whole or not at all.
        allow_pickle: read `pytorch_model*.bin` where there are no safetensors.
        max_shard_bytes: largest weight file, for directories.
        on_progress: called with (tensors done, tensors in all).

    Raises:
        CheckpointError: the source cannot be read.
        ConfigError: `out` exists already.
    """
    if source.suffix == ".gguf":
        gguf.convert(source, out, on_progress=on_progress)
        return
    writer = CheckpointWriter(out, max_shard_bytes=max_shard_bytes)
    checkpoint = open_checkpoint(source, allow_pickle=allow_pickle)
    names = checkpoint.names()
    with writer:
        for done, name in enumerate(names, start=1):
            writer.add(name, checkpoint.tensor(name))
            if on_progress:
                on_progress(done, len(names))
        settings = checkpoint.quantization
        config = checkpoint.config
        if settings is not None and config.get("quantization_config") is None:
            named = {"quant_method": settings.method, **settings.raw}
            config = config | {"quantization_config": named}
        writer.write_json("config.json", config)
        if settings is not None and settings.method in _SIDE_FILE_METHODS:
            writer.write_json(_SETTINGS_FILE, settings.raw)
        writer.copy_companions(source)


def convert_format(
    source: Path,
    out: Path,
    *,
    name: str,
    version: str | None = None,
    allow_pickle: bool = False,
    on_progress: StageProgress | None = None,
) -> Conversion:
    """Write the quantized model at `source` in another format, without loss and with a proof.

    Args:
        source: a `.gguf` file or a model directory.
        out: appears when the proof holds, with `convert_report.json` in it.
        name: `gptq` or `compressed-tensors`.
        version: `gptq` (v1) or `gptq_v2`; None = v1 where all weights are symmetric.
        allow_pickle: read `pytorch_model*.bin` where there are no safetensors.
        on_progress: called with (stage, done, in all).

    Raises:
        ConfigError: `out` exists, or the source is not quantized.
        CheckpointError: the source cannot be read.
        QuantizationError: the format cannot carry a weight without loss; nothing was written.
    """
    if source.suffix != ".gguf":
        checkpoint = open_checkpoint(source, allow_pickle=allow_pickle)
        return transcode(checkpoint, out, name=name, version=version, on_progress=on_progress)
    refuse_existing(out)
    with writing(out.parent) as parent:
        parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{out.name}.codes-", dir=out.parent) as folder:
        kept = Path(folder) / "model"
        gguf.convert(
            source,
            kept,
            keep_codes=True,
            on_progress=lambda done, total: on_progress and on_progress("read", done, total),
        )
        return transcode(
            open_checkpoint(kept), out, name=name, version=version, on_progress=on_progress
        )
