"""Rounding to the nearest point of a grid that survives its own storage."""

import pytest
import torch

from qinfer.errors import NonFiniteError, QuantizationError
from qinfer.quant import rtn
from qinfer.schemes import WeightScheme


def weight(out_features: int = 24, in_features: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed))


def textbook(W: torch.Tensor, bits: int, group: int, symmetric: bool) -> torch.Tensor:
    """The formulas of the file format, one value at a time, in float64."""
    result = torch.zeros_like(W, dtype=torch.float64)
    top = 2**bits - 1
    for row in range(W.shape[0]):
        for start in range(0, W.shape[1], group):
            values = W[row, start : start + group].double()
            if symmetric:
                scale = 2 * float(values.abs().max()) / top
                zero = float(2 ** (bits - 1))
            else:
                low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
                scale = (high - low) / top
            scale = float(torch.tensor(scale, dtype=torch.float32).half())
            if not symmetric:
                zero = float(torch.tensor(-low / scale).round().clamp(0, top))
            u = (values / scale).round().add(zero).clamp(0, top)
            result[row, start : start + group] = scale * (u - zero)
    return result


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_matches_the_textbook(bits: int, symmetric: bool) -> None:
    W = weight()
    quantized = rtn.quantize(W, WeightScheme(bits, 32, symmetric=symmetric))
    expected = textbook(W, bits, 32, symmetric)
    assert torch.allclose(quantized.dequantize().double(), expected, atol=1e-6)
    assert quantized.scales.dtype == torch.float16
    assert (quantized.zeros is None) == symmetric
    low, high = rtn.code_range(bits)
    assert low <= int(quantized.codes.min())
    assert int(quantized.codes.max()) <= high


def test_scale_is_rounded_before_codes_are_computed() -> None:
    # 2 * 0.3001 / 15 is no float16; codes must fit the scale that the file holds.
    W = torch.linspace(-0.3001, 0.3001, 64).repeat(2, 1)
    quantized = rtn.quantize(W, WeightScheme(4, 64))
    again = (W / quantized.scales.float()).round().clamp(-8, 7)
    assert torch.equal(quantized.codes.float(), again)


def test_asymmetric_range_includes_zero() -> None:
    W = torch.rand(4, 32, generator=torch.Generator().manual_seed(1)) + 3.0
    quantized = rtn.quantize(W, WeightScheme(4, 32, symmetric=False))
    assert quantized.zeros is not None
    assert bool((quantized.zeros == -8).all())  # unsigned 0
    assert float((quantized.dequantize() - W).abs().max()) < 0.3


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_vanishing_scales_g07(bits: int, symmetric: bool) -> None:
    W = torch.zeros(4, 64)
    W[1] = 1e-7
    W[2, 5] = 1e-30
    W[3, 5] = -2e-7
    quantized = rtn.quantize(W, WeightScheme(bits, 32, symmetric=symmetric))
    dense = quantized.dequantize()
    assert bool((quantized.scales > 0).all())
    assert bool(torch.isfinite(dense).all())
    assert bool((dense[0] == 0).all())
    assert bool(((dense - W).abs().amax(1) <= W.abs().amax(1)).all())


def test_float16_overflow_of_a_scale_g07() -> None:
    W = torch.ones(2, 32)
    W[1, 3] = 65504.0 * 8
    with pytest.raises(QuantizationError, match=r"up_proj.*exceeds float16"):
        rtn.quantize(W, WeightScheme(4, 32), name="up_proj")


def test_non_finite_weight_g05() -> None:
    W = weight()
    W[3, 7] = float("nan")
    with pytest.raises(NonFiniteError, match="up_proj"):
        rtn.quantize(W, WeightScheme(4, 32), name="up_proj")


def test_short_last_group_g10() -> None:
    W = weight(in_features=80)
    quantized = rtn.quantize(W, WeightScheme(8, 32))
    assert quantized.scales.shape == (24, 3)
    last = rtn.quantize(W[:, 64:], WeightScheme(8, None))
    assert torch.equal(quantized.codes[:, 64:], last.codes)
    assert torch.equal(quantized.scales[:, 2:], last.scales)
