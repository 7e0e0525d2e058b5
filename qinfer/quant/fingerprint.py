"""What decides the bytes of a quantized checkpoint, in short: to tell whether work can go on."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from qinfer import __version__
from qinfer.errors import CheckpointError
from qinfer.quant.blockwise import linear_dtype
from qinfer.quant.calibration import CalibrationSet
from qinfer.quant.hessian import sum_dtype
from qinfer.quant.job import Job

FORMAT_VERSION = 1
_SAMPLES = 64  # places of a weight file that are hashed
_SAMPLE_BYTES = 64 * 1024


def fingerprint(job: Job, calibration: CalibrationSet | None) -> dict[str, Any]:
    """Return the fingerprint of a run as JSON values.

    Weight files are told apart by their sizes, their beginnings (which hold the header) and
    samples spread over them: reading all of a large model would take as long as quantizing a block.

    Raises:
        CheckpointError: a file of the source cannot be read.
    """
    files = sorted({entry.file for entry in job.source.entries.values()})
    schemes = {target.name: str(target.scheme) for target in job.plan.targets}
    options = {k: v for k, v in job.config.to_dict().items() if k != "strict"}
    return {
        "format_version": FORMAT_VERSION,
        "qinfer": __version__,
        "source": {
            "config": _hash(json.dumps(job.source.config, sort_keys=True).encode()),
            "files": {file.name: _sampled(file) for file in files},
        },
        "options": options,
        "plan": _hash(json.dumps(schemes, sort_keys=True).encode()),
        "calibration_tokens": None if calibration is None else calibration.sha256,
        "arithmetic": None if calibration is None else arithmetic(),
    }


def arithmetic() -> dict[str, str]:
    """Return what decides how sums are rounded, which another machine may do otherwise."""
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "linears": str(linear_dtype()).removeprefix("torch."),
        "hessians": str(sum_dtype()).removeprefix("torch."),
    }


def _sampled(file: Path) -> str:
    try:
        size = file.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with file.open("rb") as stream:
            for index in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    return f"{size} bytes, {digest.hexdigest()[:16]}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
