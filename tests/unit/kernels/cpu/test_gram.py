"""Sums of products in bf16: against float64 products of what torch rounds to bf16."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qinfer.errors import ConfigError
from qinfer.kernels.cpu import gram, native

pytestmark = pytest.mark.skipif(
    not gram.available(), reason="no products of bf16 pairs: the library or the CPU has none"
)

CHUNK = 512  # tokens that are summed from zero


def rows(tokens: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))


def assert_sums(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compare with exact sums, within what summing in float32 may lose: n ε Σ |products|."""
    a, b = left.bfloat16().double(), right.bfloat16().double()
    additions = min(CHUNK, len(a)) + -(-len(a) // CHUNK)
    bound = additions * torch.finfo(torch.float32).eps * (a.abs().T @ b.abs())
    assert bool(((sums.double() - a.T @ b).abs() <= bound).all())


@given(
    tokens=st.sampled_from([1, 2, 3, 64, 511, 513, 1025]),
    columns=st.sampled_from([1, 7, 16, 17, 48, 49, 100, 129]),
    others=st.sampled_from([1, 15, 16, 33, 64]),
    seed=st.integers(0, 3),
)
def test_sums_of_products(tokens: int, columns: int, others: int, seed: int) -> None:
    left, right = rows(tokens, columns, seed), rows(tokens, others, seed + 10)
    sums = torch.zeros(columns, others)
    gram.add(sums, gram.pack(left), gram.pack(right))
    assert_sums(sums, left, right)


@given(
    tokens=st.sampled_from([1, 2, 65, 600]), columns=st.sampled_from([1, 16, 17, 47, 48, 130, 300])
)
def test_upper_triangle(tokens: int, columns: int) -> None:
    x = rows(tokens, columns)
    packed, sums, whole = gram.pack(x), torch.zeros(columns, columns), torch.zeros(columns, columns)
    gram.add(sums, packed, packed, upper=True)
    gram.add(whole, packed, packed)
    assert_sums(whole, x, x)
    assert torch.equal(whole, whole.T)
    assert torch.equal(sums.triu(), whole.triu())


def test_sums_are_added_to_what_is_there() -> None:
    x = rows(5, 20)
    before = 100 * rows(20, 20, seed=1)
    sums, added = before.clone(), torch.zeros(20, 20)
    gram.add(sums, gram.pack(x), gram.pack(x))
    gram.add(added, gram.pack(x), gram.pack(x))
    assert torch.equal(sums, before + added)


def test_chunks_begin_at_zero() -> None:
    """The bits of a long sample are those of its chunks one after the other."""
    x = rows(1300, 40)
    whole, parts = torch.zeros(40, 40), torch.zeros(40, 40)
    gram.add(whole, gram.pack(x), gram.pack(x))
    for part in x.split(CHUNK):
        gram.add(parts, gram.pack(part), gram.pack(part))
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("step", [16, 48, 128])
def test_bits_depend_neither_on_threads_nor_on_the_rows_of_a_call(
    *, step: int, upper: bool
) -> None:
    packed = gram.pack(rows(77, 205))
    whole, parts = torch.zeros(205, 205), torch.zeros(205, 205)
    gram.add(whole, packed, packed, upper=upper)
    with ThreadPoolExecutor(3) as executor:
        starts = range(0, 205, step)
        list(
            executor.map(
                lambda start: gram.add(
                    parts, packed, packed, rows=(start, min(start + step, 205)), upper=upper
                ),
                starts,
            )
        )
    kept = torch.ones(205, 205, dtype=torch.bool).triu() if upper else torch.ones(205, 205) > 0
    assert torch.equal(whole[kept], parts[kept])


def test_rows_outside_a_call_stay() -> None:
    packed, sums = gram.pack(rows(9, 100)), torch.zeros(100, 100)
    gram.add(sums, packed, packed, rows=(32, 45))
    assert bool((sums[32:45] != 0).all())
    assert bool((sums[:32] == 0).all())
    assert bool((sums[45:] == 0).all())


def test_packing_rounds_as_torch_does_and_pads_with_zeros() -> None:
    x = rows(2000, 19) * torch.logspace(-30, 30, 2000).unsqueeze(1)
    x[0, :4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.39e38])  # ties, and infinity
    packed = gram.pack(x[:-1])
    assert packed.data.shape == (2, 1000, 16, 2)
    unpacked = packed.data.permute(1, 3, 0, 2).reshape(2000, 32)
    assert torch.equal(unpacked[:-1, :19], x[:-1].bfloat16())
    assert not unpacked[-1].any()
    assert not unpacked[:, 19:].any()


def test_denormals_count_as_zero() -> None:
    assert not gram.pack(torch.full((2, 3), 1e-39)).data.any()


def test_rows_apart_are_packed_as_adjacent_ones() -> None:
    x = rows(10, 50)
    assert torch.equal(gram.pack(x[::2, 7:29]).data, gram.pack(x[::2, 7:29].clone()).data)


def test_infinities_arrive_in_the_sums() -> None:
    packed, sums = gram.pack(torch.full((2, 3), 1e25)), torch.zeros(3, 3)
    gram.add(sums, packed, packed)
    assert bool(sums.isinf().all())


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(3),
        torch.zeros(3, 4, dtype=torch.float64),
        torch.zeros(4, 3).T,
        torch.zeros(3, 0),
        torch.zeros(3, 4, device="meta"),
    ],
)
def test_what_cannot_be_packed_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="must be float32"):
        gram.pack(x)


def test_arguments_that_do_not_fit_are_refused() -> None:
    one, two = gram.pack(rows(4, 20)), gram.pack(rows(4, 30))
    sums = torch.zeros(20, 30)
    with pytest.raises(ConfigError, match=r"must be contiguous \(20, 30\) float32"):
        gram.add(torch.zeros(30, 20), one, two)
    with pytest.raises(ConfigError, match=r"must be contiguous"):
        gram.add(torch.zeros(30, 20).T, one, two)
    with pytest.raises(ConfigError, match="4 tokens cannot be paired with 5"):
        gram.add(sums, one, gram.pack(rows(5, 30)))
    with pytest.raises(ConfigError, match="do not hold"):
        gram.add(sums, replace(one, tokens=6), replace(two, tokens=6))
    with pytest.raises(ConfigError, match="refused"):
        gram.add(sums, one, two, upper=True)  # not square
    for wrong in ((1, 20), (16, 21), (-16, 20), (16, 0)):
        with pytest.raises(ConfigError, match="refused"):
            gram.add(sums, one, two, rows=wrong)
    assert not sums.any()


def test_other_instruction_sets_have_none() -> None:
    library = native.require()
    before = library.isa
    try:
        for isa in ("avx2", "portable"):
            if library.use_isa(isa):
                assert not gram.available()
                with pytest.raises(ConfigError, match="this machine has none"):
                    gram.pack(rows(2, 2))
    finally:
        library.use_isa(before)
