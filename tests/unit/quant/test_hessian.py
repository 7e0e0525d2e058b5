"""The Hessian: what it sums, in what order, and what it refuses."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from qinfer.errors import NonFiniteError, QuantizationError
from qinfer.kernels.cpu import gram
from qinfer.quant import hessian as module
from qinfer.quant.hessian import InputStatistics


@pytest.fixture(autouse=True, params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """The type to which inputs are rounded: what tests expect is computed from `x.to(dtype)`."""
    chosen: torch.dtype = request.param
    if chosen == torch.bfloat16 and not gram.available():
        pytest.skip("no products of bf16 pairs: the library or the CPU has none")
    monkeypatch.setattr(module, "sum_dtype", lambda: chosen)
    return chosen


def samples(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 20, 48, generator=torch.Generator().manual_seed(0))


def test_is_two_over_n_times_the_outer_products(dtype: torch.dtype) -> None:
    x = samples()
    hessian = InputStatistics(48, name="layer")
    for index, sample in enumerate(x):
        hessian.add(sample, sample=index)
    flat = x.reshape(-1, 48).to(dtype).double()
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
def test_pairs_sum_what_quantization_changed(in_features: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(64, in_features, generator=generator)
    x = full + 0.1 * torch.randn(64, in_features, generator=generator)
    stats = InputStatistics(in_features, name="layer", paired=True)
    for sample in range(2):
        rows = slice(32 * sample, 32 * (sample + 1))
        stats.add(x[rows], full=full[rows], sample=sample)
    cross = stats.cross()
    assert cross is not None
    expected = 2 / 64 * (full - x).to(dtype).double().T @ x.to(dtype).double()
    assert torch.allclose(cross.double(), expected, atol=1e-6)


def test_a_full_stream_where_none_is_expected_is_refused() -> None:
    x = samples()[0]
    with pytest.raises(ValueError, match="paired"):
        InputStatistics(48, name="layer").add(x, full=x, sample=2)


def test_the_first_samples_may_be_the_only_pairs(dtype: torch.dtype) -> None:
    x = torch.randn(64, 40, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    stats = InputStatistics(40, name="layer", paired=True)
    stats.add_samples([x[:20], x[20:40], x[40:]], first=0, fulls=[2 * x[:20]])
    assert (stats.num_tokens, stats.num_paired_tokens) == (64, 20)
    cross = stats.cross()
    assert cross is not None
    expected = 2 / 20 * x[:20].double().T @ x[:20].double()
    assert torch.allclose(cross.double(), expected, atol=1e-6)
    assert torch.allclose(stats.matrix().double(), 2 / 64 * x.double().T @ x.double(), atol=1e-5)


def test_without_pairs_nothing_is_handed_out() -> None:
    stats = InputStatistics(48, name="layer", paired=True)
    stats.add(samples()[0], sample=0)
    assert stats.cross() is None


@pytest.mark.parametrize("in_features", [1, 127, 128, 129, 300])
def test_the_matrix_is_symmetric_to_the_bit(in_features: int, dtype: torch.dtype) -> None:
    x = torch.randn(60, in_features, generator=torch.Generator().manual_seed(0))
    stats = InputStatistics(in_features, name="layer")
    stats.add(x, sample=0)
    matrix = stats.matrix()
    assert torch.equal(matrix, matrix.T)
    seen = x.to(dtype).double()
    assert torch.allclose(matrix.double(), 2 / 60 * seen.T @ seen, atol=1e-5)


def test_sums_are_handed_out_once() -> None:
    x = samples()[0]
    stats = InputStatistics(48, name="layer", paired=True)
    stats.add(x, full=x + 1, sample=0)
    stats.matrix()
    with pytest.raises(ValueError, match="layer: the sums are taken once"):
        stats.matrix()
    with pytest.raises(ValueError, match="layer: samples are added before"):
        stats.add(x, full=x, sample=1)
    stats.cross()
    with pytest.raises(ValueError, match="layer: the sums are taken once"):
        stats.cross()


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


def test_a_sample_without_tokens_adds_nothing() -> None:
    x = samples()[0]
    stats, other = InputStatistics(48, name="layer"), InputStatistics(48, name="layer")
    stats.add_samples([x[:0], x, x[:0]], first=0)
    other.add(x, sample=0)
    assert stats.num_tokens == 20
    assert torch.equal(stats.matrix(), other.matrix())


def test_grouping_samples_changes_no_bit() -> None:
    x, full = torch.randn(2, 6, 33, 150, generator=torch.Generator().manual_seed(0))
    single, grouped = (InputStatistics(150, name="layer", paired=True) for _ in range(2))
    for sample in range(6):
        single.add(x[sample], full=full[sample], sample=sample)
    grouped.add_samples(list(x[:4]), first=0, fulls=list(full[:4]))
    grouped.add_samples(list(x[4:]), first=4, fulls=list(full[4:]))
    assert torch.equal(single.matrix(), grouped.matrix())
    first, second = single.cross(), grouped.cross()
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


def test_without_the_library_sums_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(gram, "available", lambda: False)
    assert module.sum_dtype() == torch.float32
