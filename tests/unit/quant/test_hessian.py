"""The Hessian: what it sums, in what order, and what it refuses."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from qinfer.errors import NonFiniteError, QuantizationError
from qinfer.quant.hessian import InputStatistics


def samples(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 20, 48, generator=torch.Generator().manual_seed(0))


def test_is_two_over_n_times_the_outer_products() -> None:
    x = samples()
    hessian = InputStatistics(48, name="layer")
    for index, sample in enumerate(x):
        hessian.add(sample, sample=index)
    flat = x.reshape(-1, 48).double()
    assert hessian.num_tokens == 160
    assert torch.allclose(hessian.matrix().double(), 2 / 160 * flat.T @ flat, atol=1e-5)


def test_batching_changes_nothing_g15() -> None:
    x = samples()
    single, batched = InputStatistics(48, name="layer"), InputStatistics(48, name="layer")
    for index, sample in enumerate(x):
        single.add(sample, sample=index)
    for index in (0, 4):
        batched.add(x[index : index + 4].reshape(-1, 48), sample=index)
    assert torch.allclose(single.matrix(), batched.matrix(), atol=1e-5)


def test_non_finite_input_names_layer_and_sample_g05() -> None:
    hessian = InputStatistics(48, name="model.layers.3.mlp.down_proj")
    x = samples()[0]
    x[11, 2] = float("inf")
    with pytest.raises(NonFiniteError, match=r"layers\.3\.mlp\.down_proj.*sample 7, token 11"):
        hessian.add(x, sample=7)
    assert hessian.num_tokens == 0


def test_no_tokens_is_an_error_g14() -> None:
    with pytest.raises(QuantizationError, match="no calibration token reached"):
        InputStatistics(48, name="layer").matrix()


def test_squares_beyond_float32_are_an_error_g05() -> None:
    hessian = InputStatistics(4, name="layer")
    hessian.add(torch.full((2, 4), 1e25), sample=0)
    with pytest.raises(NonFiniteError, match="too large"):
        hessian.matrix()


@pytest.mark.parametrize("in_features", [40, 128, 300])
def test_pairs_sum_what_quantization_changed(in_features: int) -> None:
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(64, in_features, generator=generator)
    x = full + 0.1 * torch.randn(64, in_features, generator=generator)
    stats = InputStatistics(in_features, name="layer", paired=True)
    for sample in range(2):
        rows = slice(32 * sample, 32 * (sample + 1))
        stats.add(x[rows], full=full[rows], sample=sample)
    cross = stats.cross()
    assert cross is not None
    expected = 2 / 64 * (full - x).double().T @ x.double()
    assert torch.allclose(cross.double(), expected, atol=1e-6)
    with pytest.raises(ValueError, match="paired"):
        stats.add(x, sample=2)


def test_equal_bits_from_any_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    x, full = torch.randn(2, 4, 50, 600, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        here = InputStatistics(600, name="layer", paired=True)
        spread = InputStatistics(600, name="layer", paired=True)
        with ThreadPoolExecutor(3, initializer=torch.set_num_threads, initargs=(1,)) as executor:
            for sample in range(4):
                here.add(x[sample], full=full[sample], sample=sample)
                spread.add(x[sample], full=full[sample], sample=sample, executor=executor)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(here.matrix(), spread.matrix())
    first, second = here.cross(), spread.cross()
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
