"""The Hessian: what it sums, in what order, and what it refuses."""

import pytest
import torch

from qinfer.errors import NonFiniteError, QuantizationError
from qinfer.quant.hessian import Hessian


def samples(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 20, 48, generator=torch.Generator().manual_seed(0))


def test_is_two_over_n_times_the_outer_products() -> None:
    x = samples()
    hessian = Hessian(48, name="layer")
    for index, sample in enumerate(x):
        hessian.add(sample, sample=index)
    flat = x.reshape(-1, 48).double()
    assert hessian.num_tokens == 160
    assert torch.allclose(hessian.matrix().double(), 2 / 160 * flat.T @ flat, atol=1e-5)


def test_batching_changes_nothing_g15() -> None:
    x = samples()
    single, batched = Hessian(48, name="layer"), Hessian(48, name="layer")
    for index, sample in enumerate(x):
        single.add(sample, sample=index)
    for index in (0, 4):
        batched.add(x[index : index + 4].reshape(-1, 48), sample=index)
    assert torch.allclose(single.matrix(), batched.matrix(), atol=1e-5)


def test_non_finite_input_names_layer_and_sample_g05() -> None:
    hessian = Hessian(48, name="model.layers.3.mlp.down_proj")
    x = samples()[0]
    x[11, 2] = float("inf")
    with pytest.raises(NonFiniteError, match=r"layers\.3\.mlp\.down_proj.*sample 7, token 11"):
        hessian.add(x, sample=7)
    assert hessian.num_tokens == 0


def test_no_tokens_is_an_error_g14() -> None:
    with pytest.raises(QuantizationError, match="no calibration token reached"):
        Hessian(48, name="layer").matrix()


def test_squares_beyond_float32_are_an_error_g05() -> None:
    hessian = Hessian(4, name="layer")
    hessian.add(torch.full((2, 4), 1e25), sample=0)
    with pytest.raises(NonFiniteError, match="too large"):
        hessian.matrix()
