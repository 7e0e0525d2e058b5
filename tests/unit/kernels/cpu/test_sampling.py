"""The sampling kernel against the reference, in every instruction set."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from qinfer.errors import ConfigError
from qinfer.kernels import sampling
from qinfer.kernels.cpu import native
from qinfer.kernels.cpu.sampling import NativeSampler
from qinfer.kernels.sampling import Draw, Edits

pytestmark = pytest.mark.skipif(
    native.load() is None, reason="the C++ library was not built (no compiler at installation)"
)

FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.3},
    "hot": {"temperature": 30.0},
    "top_k": {"top_k": 7},
    "top_1": {"top_k": 1},
    "large top_k": {"top_k": 60},
    "top_p": {"top_p": 0.9},
    "small top_p": {"top_p": 1e-9},
    "large top_p": {"top_p": 1.0 - 1e-4},
    "min_p": {"min_p": 0.05},
    "greedy": {"temperature": 0.0, "top_k": 3, "top_p": 0.2},
    "all": {"temperature": 1.5, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
}


def logits(rows: int, vocab: int, *, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * scale


def draws(rows: int, count: int, **fields: Any) -> list[Draw]:
    numbers = random.Random(count)
    fields = {"temperature": 1.0, **fields}
    return [Draw(row=i % rows, number=numbers.random(), **fields) for i in range(count)]


def reference(x: torch.Tensor, draws: list[Draw]) -> list[int]:
    return [sampling.choose(x[draw.row], draw) for draw in draws]


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 1000, 49152])
@pytest.mark.parametrize("name", FILTERS)
def test_the_kernel_chooses_what_the_reference_chooses(isa: str, name: str, vocab: int) -> None:
    x = logits(3, vocab)
    wanted = draws(3, 40 if vocab < 2000 else 5, **FILTERS[name])
    assert NativeSampler(vocab, 1).choose(x, wanted) == reference(x, wanted)


@pytest.mark.parametrize("name", FILTERS)
def test_a_draw_depends_on_nothing_else(isa: str, name: str) -> None:
    """E02: neither on the other draws nor on threads."""
    x = logits(33, 777)
    wanted = draws(33, 33, **FILTERS[name])
    whole = NativeSampler(777, 1).choose(x, wanted)
    for threads in (2, 3):
        assert NativeSampler(777, threads).choose(x, wanted) == whole
    alone = NativeSampler(777, 2)
    assert [alone.choose(x, [draw])[0] for draw in wanted] == whole


def test_instruction_sets_agree_on_every_draw(isas: Iterator[str]) -> None:
    x = logits(4, 5000)
    wanted = [draw for fields in FILTERS.values() for draw in draws(4, 100, **fields)]
    results = [NativeSampler(5000, 2).choose(x, wanted) for _ in isas]
    assert all(result == results[0] for result in results)


def test_edits_and_allowed_tokens_come_first(isa: str) -> None:
    vocab = 300
    x = logits(2, vocab)
    best = int(x[0].argmax())
    edits = Edits(np.array([best, 5, 299]), np.array([-np.inf, 50.0, 49.0], dtype=np.float32))
    flags = np.zeros(320, dtype=np.uint8)
    flags[[best, 7, 299]] = 1
    allowed = np.packbits(flags, bitorder="little").view(np.uint32)
    sampler = NativeSampler(vocab, 1)
    for fields, expected in (
        ({"edits": edits}, 5),
        ({"allowed": allowed}, best),
        ({"edits": edits, "allowed": allowed}, 299),
    ):
        for temperature in (0.0, 1e-3):
            wanted = Draw(row=0, number=0.5, temperature=temperature, **fields)
            assert sampler.choose(x, [wanted]) == [expected]
            assert sampling.choose(x[0], wanted) == expected
    many = draws(2, 60, edits=edits, allowed=allowed, temperature=40.0, top_p=0.95)
    chosen = sampler.choose(x, many)
    assert chosen == reference(x, many)
    assert set(chosen) == {7, 299}
    assert torch.equal(x, logits(2, vocab))  # the model's own rows stay as they are


def test_nothing_left_is_told(isa: str) -> None:
    x = logits(1, 100)
    nothing = Draw(row=0, number=0.3, temperature=1.0, allowed=np.zeros(4, dtype=np.uint32))
    all_forbidden = Edits(np.arange(100), np.full(100, -np.inf, dtype=np.float32))
    greedy = Draw(row=0, edits=all_forbidden)
    assert NativeSampler(100, 2).choose(x, [nothing, greedy]) == [-1, -1]
    assert reference(x, [nothing, greedy]) == [-1, -1]


def test_ties_at_a_border_are_kept_together(isa: str) -> None:
    """No order of sorting matters: every one of the equals is drawn."""
    x = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0] + [-1.0] * 60])
    sampler = NativeSampler(65, 1)
    for fields in ({"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.9}):
        wanted = draws(1, 50, **fields)
        assert set(sampler.choose(x, wanted)) == {1, 2, 3}
        assert sampler.choose(x, wanted) == reference(x, wanted)


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2**-53])
def test_the_ends_of_the_unit_interval_never_draw_the_impossible(isa: str, number: float) -> None:
    edits = Edits(np.array([0, 99]), np.full(2, -np.inf, dtype=np.float32))
    flat = torch.zeros(1, 100)
    (token,) = NativeSampler(100, 1).choose(
        flat, [Draw(row=0, number=number, temperature=1.0, edits=edits)]
    )
    assert token == {0.0: 1, 0.5: 50}.get(number, 98)


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 100.0])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_extreme_values_stay_numbers(isa: str, temperature: float, scale: float) -> None:
    """E08."""
    x = logits(2, 500, scale=scale)
    wanted = draws(2, 20, temperature=temperature, top_p=0.9)
    assert NativeSampler(500, 1).choose(x, wanted) == reference(x, wanted)


def test_draws_follow_the_distribution(isa: str) -> None:
    x = torch.tensor([[0.0, 1.0, 2.0, -100.0]])
    chosen = torch.tensor(NativeSampler(4, 1).choose(x, draws(1, 4000)))
    shares = torch.bincount(chosen, minlength=4) / 4000
    torch.testing.assert_close(shares, x[0].softmax(-1), atol=0.03, rtol=0)


def test_what_lies_outside_is_refused() -> None:
    sampler, x = NativeSampler(100, 1), logits(2, 100)
    one = np.zeros(1, dtype=np.float32)
    for wanted in (
        Draw(row=2),
        Draw(row=-1),
        Draw(row=0, edits=Edits(np.array([100]), one)),
        Draw(row=0, edits=Edits(np.array([-1]), one)),
        Draw(row=0, edits=Edits(np.array([1, 2]), one)),
        Draw(row=0, edits=Edits(np.array([1], dtype=np.int32), one)),
        Draw(row=0, allowed=np.zeros(3, dtype=np.uint32)),
    ):
        with pytest.raises(ConfigError):
            sampler.choose(x, [wanted])
    with pytest.raises(ConfigError, match="logits"):
        sampler.choose(x[:, :99], [Draw(row=0)])
    assert sampler.choose(x, []) == []
