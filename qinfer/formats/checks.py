"""What all layouts ask of a module's tensors: that they are there, of their type, and finite."""

from collections.abc import Iterable, Mapping

import torch

from qinfer.errors import CheckpointError

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def require(tensors: Mapping[str, torch.Tensor], parts: Iterable[str], name: str) -> None:
    """Refuse module `name` if it lacks one of these tensors.

    Raises:
        CheckpointError: it does.
    """
    for part in parts:
        if part not in tensors:
            raise CheckpointError(f"{name}.{part} is missing")


def check_dtype(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    """Refuse a tensor of another type: words of another width would be read as other codes.

    Raises:
        CheckpointError: it has another.
    """
    if tensor.dtype != dtype:
        raise CheckpointError(f"{name} is {_short(tensor.dtype)}, expected {_short(dtype)}")


def check_scales(scales: torch.Tensor, name: str) -> None:
    """Refuse scales that are no numbers of a type that a quantized weight has.

    Raises:
        CheckpointError: they are not.
    """
    if scales.dtype not in SCALE_DTYPES:
        known = ", ".join(_short(dtype) for dtype in SCALE_DTYPES)
        raise CheckpointError(f"{name} is {_short(scales.dtype)}, expected floating point: {known}")
    if not torch.isfinite(scales).all():
        raise CheckpointError(f"{name} holds NaN or infinity; the file is damaged")


def check_range(values: torch.Tensor, bits: int, name: str) -> None:
    """Refuse signed numbers that do not fit into so many bits: packed, they would be others.

    Raises:
        CheckpointError: one does not fit.
    """
    limit = 1 << (bits - 1)
    if values.numel() and not -limit <= int(values.min()) <= int(values.max()) < limit:
        raise CheckpointError(
            f"{name} holds {int(values.min())} to {int(values.max())}, which {bits} bits cannot: "
            f"{-limit} to {limit - 1}; num_bits may be wrong"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
