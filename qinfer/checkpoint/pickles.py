"""Checkpoints of before safetensors, read only when asked for, and never as code.

A pickle can run anything when it is loaded, so `pytorch_model*.bin` is refused unless the caller
allows it, and then read with `weights_only=True`, which admits tensors and plain containers.
"""

import pickle
import zipfile
from pathlib import Path

import torch

from qinfer.checkpoint.shards import TensorEntry, read_index
from qinfer.errors import CheckpointError


def find_pickles(path: Path) -> Path | None:
    """Return the index or the single file of a pickled checkpoint, if the directory has one."""
    for name in ("pytorch_model.bin.index.json", "pytorch_model.bin"):
        if (path / name).is_file():
            return path / name
    return None


def index_pickles(source: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a pickled checkpoint by name.

    Raises:
        CheckpointError: a file is missing, or holds anything but named tensors.
    """
    if source.suffix == ".json":
        return read_index(source, _entries)
    return _entries(source)


def load_pickle(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of one pickled file, mapped rather than read where its layout allows.

    Raises:
        CheckpointError: the file is damaged, or holds anything but named tensors.
    """
    try:
        data = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{file} cannot be read as plain tensors: {reason}") from error
    if not isinstance(data, dict) or not all(isinstance(v, torch.Tensor) for v in data.values()):
        raise CheckpointError(f"{file} does not hold a dictionary of tensors")
    return data


def _entries(file: Path) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(file, tensor.dtype, tuple(tensor.shape))
        for name, tensor in load_pickle(file).items()
    }
