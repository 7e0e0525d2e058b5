"""A model's linears as one program, for kernels.py to time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from peaks import seconds

from qinfer.formats.weight import QuantizedWeight
from qinfer.kernels.cpu import tiled, tiling
from qinfer.kernels.cpu.arena import Arena
from qinfer.kernels.cpu.program import Int8Buffer, Program
from qinfer.schemes import WeightScheme

# Rows and columns of a decoder block's fused linears.
SHAPES = {
    "smollm2": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
    "llama-1.1b": ((2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632)),
}
FEW_ROWS = 16  # up to here memory is the limit, so the weights must come from there
DENSE = {32: torch.float32, 16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Variant:
    """How weights are stored and what they are multiplied with.

    Args:
        name: for tables.
        bits: of a weight; 16 is bfloat16, 32 is float32.
        group_size: inputs that share a scale; None = all.
        symmetric: without zero points.
        activations: quantized to 8 bits, rounded to bfloat16, or float32.
    """

    name: str
    bits: int
    group_size: int | None = None
    symmetric: bool = True
    activations: tiled.Activations = "int8"

    def weight(self, shape: tuple[int, int]) -> torch.Tensor | QuantizedWeight:
        """Return a random weight `[out, in]`."""
        if self.bits in DENSE:
            return torch.randn(shape).to(DENSE[self.bits])
        scheme = WeightScheme(self.bits, self.group_size, symmetric=self.symmetric)
        half, groups = 1 << (self.bits - 1), scheme.num_groups(shape[1])
        codes = torch.randint(-half, half, shape, dtype=torch.int8)
        zeros = None
        if not self.symmetric:
            zeros = torch.randint(-half, half, (shape[0], groups)).short()
        return QuantizedWeight(codes, torch.rand(shape[0], groups).half(), scheme, zeros)


VARIANTS = (
    Variant("int4 g64", 4, 64),
    Variant("int4 g64 asym", 4, 64, symmetric=False),
    Variant("int8 per channel", 8),
    Variant("int8 g64 asym", 8, 64, symmetric=False),
    Variant("int4 g64, exact", 4, 64, activations="exact"),
    Variant("bf16", 16, activations="bf16"),
    Variant("bf16, exact", 16, activations="exact"),
    Variant("fp32, exact", 32, activations="exact"),
)


@dataclass
class Case:
    """Linears with so many rows of activations each."""

    rows: int
    program: Program = field(default_factory=Program)
    weights: int = 0
    weight_bytes: int = 0
    address: int = 0

    @property
    def operations(self) -> int:
        """Multiplications and additions of a run."""
        return 2 * self.weights * self.rows

    def seconds(self, threads: int) -> float:
        """Run it once."""
        return seconds(lambda: self.program.run(threads), threads)


def make_case(
    variant: Variant, shapes: Sequence[tuple[int, int]], rows: int, megabytes: int
) -> Case:
    """Return a block's linears: once, or where rows are few so often that no cache holds them."""
    samples = [tiling.tile(variant.weight(shape)) for shape in shapes]
    block_bytes = sum(sample.nbytes for sample in samples)
    copies = -(-(megabytes << 20) // block_bytes) if rows <= FEW_ROWS else 1
    arena = Arena(copies * (block_bytes + 4096))
    case = Case(rows)
    num_tokens = torch.tensor([rows])
    for copy in range(copies * len(shapes)):
        weight = _placed(samples[copy % len(shapes)], arena)
        case.address = case.address or weight.data.data_ptr()
        floats = torch.randn(rows, weight.in_features)
        x: tiled.Activation = floats
        if variant.activations == "int8":
            x = _quantized(floats, num_tokens)
        elif variant.activations == "bf16":
            x = tiled.RoundedRows(floats)
        out = torch.empty(rows, weight.out_features)
        tiled.add_linear(case.program, weight, x, out, num_tokens)
        case.weights += weight.in_features * weight.out_features
        case.weight_bytes += weight.nbytes
    return case


def _placed(weight: tiled.TiledWeight, arena: Arena) -> tiled.TiledWeight:
    """Return a copy of a weight in the arena."""

    def copy(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else arena.take(part.shape, part.dtype).copy_(part)

    data = arena.take(weight.data.shape, torch.uint8).copy_(weight.data)
    return tiled.TiledWeight(
        data=data,
        scales=copy(weight.scales),
        zeros=copy(weight.zeros),
        offsets=copy(weight.offsets),
        permutation=None,
        kind=weight.kind,
        out_features=weight.out_features,
        in_features=weight.in_features,
        group_size=weight.group_size,
    )


def _quantized(x: torch.Tensor, num_tokens: torch.Tensor) -> Int8Buffer:
    rows, program = Int8Buffer(x.shape[0], x.shape[1]), Program()
    program.quantize(x, num_tokens, rows)
    program.run(1)
    return rows
