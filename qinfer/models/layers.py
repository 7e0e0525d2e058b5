"""The layers of a decoder: a linear with its chosen kernel, the gated MLP and the norm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qinfer.formats.weight import QuantizedWeight, can_concat, concat_out
from qinfer.kernels import reference
from qinfer.kernels.cpu import native
from qinfer.kernels.linear import choose_linear
from qinfer.kernels.spec import LinearSpec

Weight = torch.Tensor | QuantizedWeight


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Which kernel a layer got, and why not the ones before it.

    Args:
        layer: the module's name.
        description: the weight's form, such as `int4 g64 sym 576x1536`.
        kernel: the implementation's name.
        refusals: `(name, reason)` of the candidates before it.
    """

    layer: str
    description: str
    kernel: str
    refusals: tuple[tuple[str, str], ...]


class Linear:
    """`y = x @ W.T + b` with a kernel that was chosen when the weight was loaded.

    Args:
        weight: dense `[out, in]`, or quantized.
        bias: `[out]` or None.
        dtype: of activations, and of W where it is dense.
        device: where it runs.
    """

    def __init__(
        self, weight: Weight, bias: torch.Tensor | None, *, dtype: torch.dtype, device: str
    ) -> None:
        self.spec = describe_linear(weight, dtype, device)
        choice = choose_linear(self.spec)
        self.kernel_name = choice.implementation.name
        self.refusals = choice.refusals
        self.bias = None if bias is None else bias.to(dtype)
        self._kernel = choice.implementation.prepare(weight, self.spec)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the prepared weight and the bias."""
        return self._kernel.resident_bytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x` `[rows, in]`; returns `[rows, out]`."""
        y = self._kernel(x)
        return y if self.bias is None else y + self.bias

    def row(self, name: str) -> KernelRow:
        """Describe the choice for a report."""
        spec = self.spec
        form = str(spec.dtype).removeprefix("torch.") if spec.scheme is None else str(spec.scheme)
        held = ""
        if spec.scheme is not None and self.kernel_name == "cpu.packed":
            held = native.held_note(spec.scheme.bits)
        description = f"{form} {spec.in_features}x{spec.out_features}{held}"
        return KernelRow(name, description, self.kernel_name, self.refusals)


class LinearGroup:
    """Linears that read the same input, run as one where their weights allow it.

    Args:
        weights: by name, in the order of the outputs.
        biases: by name; names without a bias are absent.
        dtype: of activations.
        device: where they run.
        fuse: join equal schemes along the output; else keep each apart, without a copy.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        biases: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        device: str,
        fuse: bool = True,
    ) -> None:
        self.names = tuple(weights)
        self.sizes = [out_features(weight) for weight in weights.values()]
        fused = fuse_weights(list(weights.values())) if fuse and len(weights) > 1 else None
        if fused is None:
            self._parts = [
                Linear(weight, biases.get(name), dtype=dtype, device=device)
                for name, weight in weights.items()
            ]
        else:
            bias = fuse_biases(weights, biases)
            self._parts = [Linear(fused, bias, dtype=dtype, device=device)]

    @property
    def resident_bytes(self) -> int:
        """Bytes of all prepared weights and biases."""
        return sum(part.resident_bytes for part in self._parts)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Apply to `x` `[rows, in]`; returns one `[rows, out]` per name."""
        if len(self._parts) == len(self.names):
            return tuple(part(x) for part in self._parts)
        return torch.split(self._parts[0](x), self.sizes, dim=-1)

    def rows(self, prefix: str) -> list[KernelRow]:
        """Describe the choices for a report."""
        if len(self._parts) == len(self.names):
            return [
                part.row(f"{prefix}.{name}")
                for name, part in zip(self.names, self._parts, strict=True)
            ]
        return [self._parts[0].row(f"{prefix}.{'+'.join(self.names)}")]


class GatedMLP:
    """`down(silu(gate(x)) * up(x))` (SwiGLU, arXiv 2002.05202).

    Args:
        gate_up: gate, then up.
        down: alone.
    """

    def __init__(self, gate_up: LinearGroup, down: LinearGroup) -> None:
        self.groups = (gate_up, down)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x` `[rows, hidden]`."""
        return self.output(self.activation(x))

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        """Return what down reads: `[rows, intermediate]`."""
        gate, up = self.groups[0](x)
        return reference.silu_mul(gate, up)

    def output(self, activation: torch.Tensor) -> torch.Tensor:
        """Project what `activation` returned back: `[rows, hidden]`."""
        return self.groups[1](activation)[0]


class RMSNorm:
    """Root mean square normalization (arXiv 1910.07467)."""

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        self.weight = weight.to(dtype)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension of `x`."""
        return reference.rms_norm(x, self.weight, self.eps)


def describe_linear(weight: Weight, dtype: torch.dtype, device: str) -> LinearSpec:
    """Return what a kernel needs to know of a layer with this weight."""
    if isinstance(weight, QuantizedWeight):
        return LinearSpec(
            weight.in_features,
            weight.out_features,
            dtype,
            device,
            weight.scheme,
            scattered_groups=weight.group_index is not None,
        )
    return LinearSpec(weight.shape[1], weight.shape[0], dtype, device)


def out_features(weight: Weight) -> int:
    """Return the rows of a weight."""
    return weight.out_features if isinstance(weight, QuantizedWeight) else weight.shape[0]


def fuse_weights(weights: Sequence[Weight]) -> Weight | None:
    """Join weights that read the same input along their output, or None if they differ in form."""
    dense = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if len(dense) == len(weights):
        return torch.cat(dense)
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(quantized) == len(weights) and can_concat(quantized):
        return concat_out(quantized)
    return None


def fuse_biases(
    weights: Mapping[str, Weight], biases: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """Join the biases of fused weights, zeros where there is none; None if there are none."""
    if not biases:
        return None
    any_bias = next(iter(biases.values()))
    return torch.cat(
        [
            biases.get(name, any_bias.new_zeros(out_features(weight)))
            for name, weight in weights.items()
        ]
    )
