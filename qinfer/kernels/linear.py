"""Linear layers: their interface, their candidates and how one is chosen."""

from collections.abc import Callable
from typing import Protocol

import torch

from qinfer.formats.weight import QuantizedWeight
from qinfer.kernels import reference
from qinfer.kernels.cpu import native
from qinfer.kernels.select import Choice, Implementation, choose
from qinfer.kernels.spec import LinearSpec


class LinearKernel(Protocol):
    """A prepared weight that can be applied."""

    @property
    def resident_bytes(self) -> int:
        """Bytes that the prepared weight occupies."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x @ W.T` for `x` `[rows, in]`, as `[rows, out]`."""
        ...


# Weights that are dequantized at a time (8 MiB as bfloat16), in whole multiples of so many rows.
_PART_WEIGHTS = 1 << 22
_PART_ROWS = 64

PrepareLinear = Callable[[torch.Tensor | QuantizedWeight, LinearSpec], LinearKernel]
LinearImplementation = Implementation[LinearSpec, PrepareLinear]


class DenseLinear:
    """A dense weight, multiplied by torch in fixed tiles of rows.

    A quantized weight is dequantized once, so that it runs at the speed and in the memory of a
    dense one.
    """

    def __init__(self, weight: torch.Tensor | QuantizedWeight, spec: LinearSpec) -> None:
        if isinstance(weight, QuantizedWeight):
            weight = weight.dequantize(spec.dtype)
        self.weight = own(weight.to(spec.dtype))  # [out, in]

    @property
    def resident_bytes(self) -> int:
        """Bytes that the prepared weight occupies."""
        return self.weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x @ W.T` for `x` `[rows, in]`, as `[rows, out]`."""
        return reference.linear(x, self.weight)


class PackedLinear:
    """Codes that stay packed in memory; each call dequantizes them into scratch, natively.

    A large weight goes part by part, so that the scratch stays small. The bits equal those of
    `DenseLinear` with the same weight.
    """

    def __init__(self, weight: torch.Tensor | QuantizedWeight, spec: LinearSpec) -> None:
        if not isinstance(weight, QuantizedWeight):
            raise TypeError("a packed linear layer needs a quantized weight")
        self.packed = native.pack(weight)
        self.dtype = spec.dtype
        self.rows_per_part = max(_PART_ROWS, _PART_WEIGHTS // spec.in_features)
        self.rows_per_part -= self.rows_per_part % _PART_ROWS

    @property
    def resident_bytes(self) -> int:
        """Bytes that the prepared weight occupies."""
        return self.packed.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x @ W.T` for `x` `[rows, in]`, as `[rows, out]`."""
        threads = torch.get_num_threads()
        parts = []
        for start in range(0, self.packed.out_features, self.rows_per_part):
            rows = (start, min(start + self.rows_per_part, self.packed.out_features))
            weight = native.dequantize(self.packed, self.dtype, rows=rows, threads=threads)
            parts.append(reference.linear(x, weight))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` contiguous in memory of its own.

    A view would keep the mapped file or the larger tensor behind it alive.
    """
    if tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _supports_packed(spec: LinearSpec) -> str | None:
    if spec.scheme is None:
        return "the weight is dense"
    if spec.device != "cpu":
        return f"runs on the CPU, not on {spec.device}"
    reason = native.unsupported_reason(spec.scheme.bits)
    if reason is not None:
        return reason
    if spec.dtype not in {torch.float32, torch.bfloat16}:
        return f"dequantizes to float32 and bfloat16, not {spec.dtype}"
    return native.missing_reason()


def _supports_dense(spec: LinearSpec) -> str | None:
    return None if spec.device == "cpu" else f"runs on the CPU, not on {spec.device}"


LINEAR_CANDIDATES: tuple[LinearImplementation, ...] = (
    Implementation("cpu.packed", _supports_packed, PackedLinear),
    Implementation("reference.dense", _supports_dense, DenseLinear),
)


def choose_linear(spec: LinearSpec) -> Choice[LinearSpec, PrepareLinear]:
    """Return the implementation for a linear layer; see `select.choose`."""
    return choose(spec, LINEAR_CANDIDATES)
