"""Groups of linears: fused where equal, apart where not, the same numbers either way."""

import pytest
import torch

from qinfer.formats.weight import QuantizedWeight
from qinfer.kernels.cpu import native
from qinfer.models.layers import Linear, LinearGroup, Weight
from qinfer.schemes import WeightScheme

NAMES = ("q", "k", "v")


def dense(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))


def quantized(rows: int, seed: int, bits: int = 4) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (rows, 64), generator=generator, dtype=torch.int8)
    scales = torch.rand(rows, 2, generator=generator).half()
    return QuantizedWeight(codes, scales, WeightScheme(bits, 32))


def as_dense(weight: Weight) -> torch.Tensor:
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


MIXES: dict[str, tuple[list[Weight], int]] = {
    "dense": ([dense(48, 0), dense(16, 1), dense(16, 2)], 1),
    "int4": ([quantized(48, 0), quantized(16, 1), quantized(16, 2)], 1),
    "q 8 bits": ([quantized(48, 0, 8), quantized(16, 1), quantized(16, 2)], 3),
    "k and v dense": ([quantized(48, 0), dense(16, 1), dense(16, 2)], 3),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("biased", [(), ("q", "v"), NAMES])
def test_g19_any_mix_runs_and_fuses_only_what_is_equal(
    mix: str, fuse: bool, biased: tuple[str, ...]
) -> None:
    weights, num_fused = MIXES[mix]
    biases = {name: torch.randn(out) for name, out in zip(NAMES, (48, 16, 16), strict=True)}
    biases = {name: bias for name, bias in biases.items() if name in biased}
    group = LinearGroup(
        dict(zip(NAMES, weights, strict=True)),
        biases,
        dtype=torch.float32,
        device="cpu",
        fuse=fuse,
    )
    assert len(group.rows("layer")) == (num_fused if fuse else 3)
    x = dense(5, 9)
    for name, weight, y in zip(NAMES, weights, group(x), strict=True):
        expected = x @ as_dense(weight).t() + biases.get(name, torch.zeros(1))
        assert torch.allclose(y, expected, atol=1e-4)


def test_a_row_tells_form_kernel_and_refusals() -> None:
    row = Linear(quantized(16, 0, 3), None, dtype=torch.float32, device="cpu").row("mlp.up_proj")
    if native.load() is not None:
        assert row.kernel == "cpu.packed"
        assert row.description == "int3 g32 sym 64x16, held in 4 bits"
    row = Linear(quantized(16, 0, 3), None, dtype=torch.float16, device="cpu").row("mlp.up_proj")
    assert row.description == "int3 g32 sym 64x16"
    assert row.kernel == "reference.dense"
    reason = "dequantizes to float32 and bfloat16, not torch.float16"
    assert row.refusals == (("cpu.packed", reason),)
