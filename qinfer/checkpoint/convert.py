"""Any readable model as a safetensors directory: GGUF dequantized, everything else as it is."""

from collections.abc import Callable
from pathlib import Path

from qinfer.checkpoint import gguf
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.checkpoint.writer import DEFAULT_SHARD_BYTES, CheckpointWriter

_SETTINGS_FILE = "quantize_config.json"

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
        writer.write_json("config.json", checkpoint.config)
        if checkpoint.quantization:
            writer.write_json(_SETTINGS_FILE, checkpoint.quantization.raw)
        writer.copy_companions(source)
