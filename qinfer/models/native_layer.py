"""One decoder layer as ops of a C++ program: recorded once, run by one call per step.

`Recording` is the small vocabulary in which a layer is written down: norm, linears, attention,
gated MLP. It owns the activations that the ops of all layers share.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from qinfer.formats.weight import QuantizedWeight, can_concat
from qinfer.kernels.cpu import native, paged, tiled, tiling
from qinfer.kernels.cpu.program import Int8Buffer, Norm, OpKind, Program, Watch
from qinfer.kernels.spec import AttnSpec, PagedKV
from qinfer.models.config import ModelConfig
from qinfer.models.decoder import DOWN, GATE_UP, OUTPUT, QKV
from qinfer.models.layers import KernelRow, Weight, fuse_weights
from qinfer.models.native_index import StepIndex
from qinfer.models.rope import RotaryTable
from qinfer.schemes import WeightScheme


@dataclass(frozen=True, slots=True, eq=False)
class WeightRows:
    """A weight that is read some rows at a time, when it is put into tiles.

    Args:
        shape: `[out, in]`.
        form: the type of a dense weight, or the scheme of a quantized one.
        read: returns rows `[begin, end)` in that form.
        wide_scales: float16 cannot hold its scales; see `tiling.needs_wide_scales`.
    """

    shape: tuple[int, int]
    form: torch.dtype | WeightScheme
    read: tiling.ReadRows
    wide_scales: bool = False


@dataclass(frozen=True, slots=True)
class Placing:
    """How weights are put into tiles.

    Args:
        int8_activations: quantize the inputs of quantized weights to int8 and, where the machine
            has products of bfloat16, round those of bfloat16 weights to that; else all are float32.
        allocate: where the tiles are put.
        team: threads that repack while this one reads on; None = it does both.
    """

    int8_activations: bool = True
    allocate: tiling.Allocate = tiling.aligned_bytes
    team: Executor | None = None


Source = QuantizedWeight | WeightRows


@dataclass(frozen=True, slots=True, eq=False)
class NativeLinear:
    """A weight in tiles and how its input arrives.

    Args:
        weight: the tiles.
        bias: float32 `[out]` or None.
        activations: what becomes of the input.
        offset: first column in the group's output.
        row: the line in a report of kernels.
    """

    weight: tiled.TiledWeight
    bias: torch.Tensor | None
    activations: tiled.Activations
    offset: int
    row: KernelRow


class NativeGroup:
    """Linears that read one input and write side by side into one output.

    Args:
        weights: by name, in the order of the outputs.
        biases: by name; names without a bias are absent.
        prefix: of the names, for reports.
        placing: how their tiles are made.
    """

    def __init__(
        self,
        weights: Mapping[str, Source],
        biases: Mapping[str, torch.Tensor],
        *,
        prefix: str,
        placing: Placing,
    ) -> None:
        parts = {name: _rows(weight) for name, weight in weights.items()}
        joined = dict(biases)
        if len(parts) > 1 and _can_join(list(weights.values())):
            name = "+".join(parts)
            joined = _joined_bias(name, parts, biases)
            parts = {name: _join(list(parts.values()))}
        self.linears: list[NativeLinear] = []
        self.out_features = 0
        for name, rows in parts.items():
            bias = joined.get(name)
            tiles = tiling.tile_rows(
                rows.shape,
                rows.read,
                wide_scales=rows.wide_scales,
                allocate=placing.allocate,
                team=placing.team,
            )
            activations = _activations(rows.form, placing)
            self.linears.append(
                NativeLinear(
                    weight=tiles,
                    bias=None if bias is None else bias.float().contiguous(),
                    activations=activations,
                    offset=self.out_features,
                    row=_row(f"{prefix}{name}", rows, activations),
                )
            )
            self.out_features += rows.shape[0]
        self.in_features = self.linears[0].weight.in_features

    @property
    def resident_bytes(self) -> int:
        """Bytes of tiles and biases."""
        biases = (linear.bias for linear in self.linears)
        return sum(linear.weight.nbytes for linear in self.linears) + sum(
            bias.nbytes for bias in biases if bias is not None
        )

    @property
    def permutations(self) -> list[torch.Tensor | None]:
        """The orders of columns in which quantized inputs are needed, each once."""
        orders: list[torch.Tensor | None] = []
        for linear in self.linears:
            is_new = _find(orders, linear.weight.permutation) is None
            if linear.activations == "int8" and is_new:
                orders.append(linear.weight.permutation)
        return orders

    @property
    def reads_floats(self) -> bool:
        """Whether the unquantized input is needed: by a linear, or to quantize it again."""
        all_int8 = all(linear.activations == "int8" for linear in self.linears)
        return len(self.permutations) != 1 or not all_int8


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """An input of a group, in the forms that its linears need.

    Args:
        floats: float32 `[max_tokens, in]`, or None.
        int8: quantized, one per order of columns.
    """

    floats: torch.Tensor | None
    int8: tuple[Int8Buffer, ...]


class Recording:
    """A program under construction, and the activations that its ops share.

    Args:
        program: where the ops go.
        max_tokens: rows that fit.
        num_tokens: int64 `[1]`, read when the program runs.
    """

    def __init__(self, program: Program, max_tokens: int, num_tokens: torch.Tensor) -> None:
        self.program = program
        self.bad_layers = torch.full((max_tokens,), -1)  # see `kernels.cpu.program.Watch`
        self.max_tokens = max_tokens
        self.num_tokens = num_tokens
        self._floats: dict[tuple[str, int], torch.Tensor] = {}
        self._int8: dict[tuple[str, int, int], Int8Buffer] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all activations."""
        floats = sum(tensor.nbytes for tensor in self._floats.values())
        return floats + sum(buffer.nbytes for buffer in self._int8.values())

    def floats(self, name: str, columns: int) -> torch.Tensor:
        """Return the shared activation `name`, float32 `[max_tokens, columns]`."""
        key = (name, columns)
        if key not in self._floats:
            self._floats[key] = torch.zeros(self.max_tokens, columns)
        return self._floats[key]

    def feed(self, name: str, group: NativeGroup) -> Feed:
        """Return the shared memory of a group's input."""
        columns = group.in_features
        keys = [(name, columns, index) for index in range(len(group.permutations))]
        for key in keys:
            if key not in self._int8:
                self._int8[key] = Int8Buffer(self.max_tokens, columns)
        floats = self.floats(name, columns) if group.reads_floats else None
        return Feed(floats, tuple(self._int8[key] for key in keys))

    def norm(self, x: torch.Tensor, norm: Norm, group: NativeGroup, layer: int) -> Feed:
        """Normalize `x`, the output of `layer`, for a group; notes rows that are not finite."""
        feed = self.feed("normed", group)
        first, order = _first(feed, group)
        watched = replace(norm, watch=Watch(self.bad_layers, layer))
        self.program.norm(
            x, watched, self.num_tokens, out=feed.floats, int8=first, permutation=order
        )
        self._quantize_others(feed, group)
        return feed

    def silu_mul(self, gate_up: torch.Tensor, group: NativeGroup) -> Feed:
        """Gate the MLP's inner activations for a group."""
        feed = self.feed("gated", group)
        first, order = _first(feed, group)
        self.program.silu_mul(
            gate_up, self.num_tokens, out=feed.floats, int8=first, permutation=order
        )
        self._quantize_others(feed, group)
        return feed

    def linears(
        self, group: NativeGroup, feed: Feed, *, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply a group; with `onto`, its output is added there (the residual stream)."""
        out = self.floats("projected", group.out_features) if onto is None else onto
        orders = group.permutations
        for linear in group.linears:
            x: tiled.Activation
            if linear.activations == "int8":
                x = feed.int8[_find(orders, linear.weight.permutation) or 0]
            elif feed.floats is None:
                raise RuntimeError("a group's input lacks the form that one of its linears reads")
            else:
                x = tiled.RoundedRows(feed.floats) if linear.activations == "bf16" else feed.floats
            part = out[:, linear.offset : linear.offset + linear.weight.out_features]
            tiled.add_linear(
                self.program,
                linear.weight,
                x,
                part,
                self.num_tokens,
                bias=linear.bias,
                residual=None if onto is None else part,
            )
        return out

    def _quantize_others(self, feed: Feed, group: NativeGroup) -> None:
        """Quantize the input in the orders after the first."""
        for order, buffer in list(zip(group.permutations, feed.int8, strict=True))[1:]:
            if feed.floats is None:
                raise RuntimeError("a second order of columns needs the unquantized input")
            self.program.quantize(feed.floats, self.num_tokens, buffer, permutation=order)

    def attention(
        self, qkv: torch.Tensor, attention: "NativeAttention", layer: "NativeLayer", pages: PagedKV
    ) -> Feed:
        """Rotate, store K and V, and attend through the cache, for the layer's output."""
        group, index, spec = layer.output, attention.index.cache, attention.spec
        feed = self.feed("mixed", group)
        first, order = _first(feed, group)
        out = self.floats("mixed", group.in_features)
        rotation = layer.rotation(attention.rotary)
        paged.rope_store(self.program, qkv, rotation, pages, spec.kv, index)
        output = paged.AttentionOutput(out, attention.scratch, first, order)
        window = spec.sliding_window
        paged.attention(self.program, qkv, output, pages, spec.kv, index, window)
        self._quantize_others(feed, group)
        return feed


@dataclass(frozen=True, slots=True, eq=False)
class NativeAttention:
    """What the attention of all layers with one sliding window shares.

    Args:
        spec: heads, cache and window.
        rotary: cos and sin.
        index: the step's index tensors.
        scratch: memory of the kernel.
    """

    spec: AttnSpec
    rotary: RotaryTable
    index: StepIndex
    scratch: torch.Tensor


class NativeLayer:
    """The weights of one decoder layer, in tiles, and their order in a program.

    Args:
        config: the model's facts.
        layer: index, for names and the sliding window.
        linear: returns the weight of a linear by its name in the block; each is asked for once, and
            let go before the next group is read.
        vectors: norms and biases by name, float32.
        placing: how tiles are made.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        linear: Callable[[str], Source],
        vectors: Mapping[str, torch.Tensor],
        *,
        placing: Placing,
    ) -> None:
        self.index = layer
        self.window = config.windows[layer]

        def group(*names: str) -> NativeGroup:
            return NativeGroup(
                {name: linear(name) for name in names},
                {name: vectors[f"{name}.bias"] for name in names if f"{name}.bias" in vectors},
                prefix=f"model.layers.{layer}.",
                placing=placing,
            )

        self._qkv, self.output = group(*QKV), group(OUTPUT)
        self._gate_up, self._down = group(*GATE_UP), group(DOWN)
        self._input_norm = Norm(vectors["input_layernorm.weight"], config.rms_norm_eps)
        self._mlp_norm = Norm(vectors["post_attention_layernorm.weight"], config.rms_norm_eps)
        self._q_norm = vectors.get("self_attn.q_norm.weight")
        self._k_norm = vectors.get("self_attn.k_norm.weight")

    @property
    def groups(self) -> tuple[NativeGroup, ...]:
        """Its linears, in order."""
        return (self._qkv, self.output, self._gate_up, self._down)

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights, biases and norms."""
        norms = (self._input_norm.weight, self._mlp_norm.weight, self._q_norm, self._k_norm)
        return sum(group.resident_bytes for group in self.groups) + sum(
            norm.nbytes for norm in norms if norm is not None
        )

    def rotation(self, rotary: RotaryTable) -> paged.Rotation:
        """Return what happens to its queries and keys before they are stored."""
        cos, sin = rotary.cos.squeeze(1), rotary.sin.squeeze(1)
        return paged.Rotation(cos, sin, self._q_norm, self._k_norm, self._input_norm.eps)

    def record(
        self,
        recording: Recording,
        hidden: torch.Tensor,
        attention: NativeAttention,
        pages: PagedKV,
    ) -> None:
        """Write the layer down; it updates `hidden` float32 `[max_tokens, hidden]` in place."""
        x = recording.norm(hidden, self._input_norm, self._qkv, max(self.index - 1, 0))
        qkv = recording.linears(self._qkv, x)
        mixed = recording.attention(qkv, attention, self, pages)
        recording.linears(self.output, mixed, onto=hidden)
        x = recording.norm(hidden, self._mlp_norm, self._gate_up, self.index)
        gate_up = recording.linears(self._gate_up, x)
        inner = recording.silu_mul(gate_up, self._down)
        recording.linears(self._down, inner, onto=hidden)


def _activations(form: torch.dtype | WeightScheme, placing: Placing) -> tiled.Activations:
    """Return what becomes of the input of a weight of this form."""
    if not placing.int8_activations:
        return "exact"
    if isinstance(form, WeightScheme):
        return "int8"
    pairs = form == torch.bfloat16 and OpKind.LINEAR_BF16.available
    return "bf16" if pairs else "exact"


def _row(name: str, rows: WeightRows, activations: tiled.Activations) -> KernelRow:
    form = str(rows.form).removeprefix("torch.")
    held = native.held_note(rows.form.bits) if isinstance(rows.form, WeightScheme) else ""
    outputs, inputs = rows.shape
    description = f"{form} {inputs}x{outputs}{held}"
    return KernelRow(name, description, f"cpu.{activations}", ())


def _rows(weight: Source) -> WeightRows:
    if isinstance(weight, WeightRows):
        return weight
    native.check_groups(weight)
    shape = (weight.out_features, weight.in_features)
    return WeightRows(shape, weight.scheme, weight.rows, tiling.needs_wide_scales(weight))


def _can_join(weights: Sequence[Source]) -> bool:
    """Tell whether weights share their form, so that one op can compute them."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if quantized:
        return len(quantized) == len(weights) and can_concat(quantized)
    forms = {weight.form for weight in weights if isinstance(weight, WeightRows)}
    return len(forms) == 1


def _join(parts: Sequence[WeightRows]) -> WeightRows:
    """Return weights one below the other, still unread."""
    starts = list(accumulate((part.shape[0] for part in parts), initial=0))

    def read(begin: int, end: int) -> Weight:
        pieces = [
            part.read(max(begin - start, 0), min(end - start, part.shape[0]))
            for start, part in zip(starts, parts, strict=False)
            if begin < start + part.shape[0] and start < end
        ]
        if len(pieces) == 1:
            return pieces[0]
        joined = fuse_weights(pieces)
        if joined is None:
            raise RuntimeError("weights were joined that differ in form")
        return joined

    wide = any(part.wide_scales for part in parts)
    return WeightRows((starts[-1], parts[0].shape[1]), parts[0].form, read, wide)


def _joined_bias(
    name: str, parts: Mapping[str, WeightRows], biases: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    if not biases:
        return {}
    zeros = {part: torch.zeros(rows.shape[0]) for part, rows in parts.items()}
    return {name: torch.cat([biases.get(part, zeros[part]) for part in parts])}


def _first(feed: Feed, group: NativeGroup) -> tuple[Int8Buffer | None, torch.Tensor | None]:
    """Return the quantized form that an op writes itself, and its order of columns."""
    return (feed.int8[0], group.permutations[0]) if feed.int8 else (None, None)


def _find(orders: Sequence[torch.Tensor | None], order: torch.Tensor | None) -> int | None:
    for index, known in enumerate(orders):
        if known is order or (
            known is not None and order is not None and torch.equal(known, order)
        ):
            return index
    return None
