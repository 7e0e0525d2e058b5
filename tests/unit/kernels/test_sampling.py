"""The reference of sampling against transformers' logits processors."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from qinfer.kernels.sampling import (
    Draw,
    Edits,
    choose,
    edited,
    filtered,
    keep_top_k,
    keep_top_p,
    keep_typical,
    pick,
)

VOCAB = 500


def logits(seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def distribution(row: torch.Tensor, **fields: Any) -> torch.Tensor:
    """Return the probabilities that a draw draws from."""
    draw = Draw(row=0, **{"temperature": 1.0, **fields})
    return filtered((row - row.max()) / draw.temperature, draw).softmax(-1)


@pytest.mark.parametrize(
    ("fields", "warpers"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"typical_p": 0.2}, [TypicalLogitsWarper(0.2)]),
        ({"typical_p": 0.95}, [TypicalLogitsWarper(0.95)]),
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"top_p": 0.9999}, [TopPLogitsWarper(0.9999)]),
        ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
        (
            {"temperature": 1.5, "typical_p": 0.9, "top_k": 50, "top_p": 0.7, "min_p": 0.01},
            [
                TemperatureLogitsWarper(1.5),
                TypicalLogitsWarper(0.9),
                TopKLogitsWarper(50),
                TopPLogitsWarper(0.7),
                MinPLogitsWarper(0.01),
            ],
        ),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_filters_leave_the_distribution_that_transformers_leaves(
    fields: dict[str, Any], warpers: list[LogitsProcessor], seed: int
) -> None:
    theirs = logits(seed).unsqueeze(0)
    for warper in warpers:
        theirs = warper(torch.tensor([[0]]), theirs)
    ours = distribution(logits(seed), **fields)
    torch.testing.assert_close(ours, theirs[0].softmax(-1), atol=1e-6, rtol=1e-4)


def test_typical_sampling_may_drop_the_most_likely_token() -> None:
    row = torch.tensor([5.0, *[3.0] * 20])
    assert keep_typical(row, 0.2).isneginf().tolist() == [True] + [False] * 20


def test_ties_at_the_border_are_kept_together() -> None:
    row = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    assert keep_top_k(row, 2).isfinite().tolist() == [False, True, True, True, False]
    assert keep_top_p(row, 0.3).isfinite().tolist() == [False, True, True, True, False]


def test_min_p_and_top_k_beyond_the_vocabulary_change_nothing() -> None:
    row = logits(8)
    assert torch.equal(keep_top_k(row, VOCAB + 1), row)
    assert math.isfinite(float(row.sum()))


@pytest.mark.parametrize("p", [1e-9, 0.5, 1.0 - 1e-7])
def test_top_p_keeps_at_least_one_and_looks_beyond_the_first_try(p: float) -> None:
    row = torch.zeros(2000)  # flat: half of the mass needs more than the first 256
    row[3] = 1e-3
    kept = int(keep_top_p(row, p).isfinite().sum())
    assert kept == (1 if p < 0.1 else 2000)


def test_draws_follow_the_distribution() -> None:
    row = torch.tensor([0.0, 1.0, 2.0, -torch.inf])
    counts = torch.zeros(4)
    for number in torch.rand(4000, generator=torch.Generator().manual_seed(0)).tolist():
        counts[pick(row, number)] += 1
    torch.testing.assert_close(counts / 4000, row.softmax(-1), atol=0.03, rtol=0)


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2**-53])
def test_the_ends_of_the_unit_interval_never_draw_the_impossible(number: float) -> None:
    row = torch.full((VOCAB,), -torch.inf)
    row[[17, 42]] = 0.3
    assert pick(row, number) in {17, 42}


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    """E08: fp32 logits divided by a small temperature must not turn into NaN."""
    row = logits(1) * 1e4
    assert distribution(row, temperature=temperature).isfinite().all()
    if temperature <= 1e-4:
        assert choose(row, Draw(row=0, number=0.7, temperature=temperature)) == int(row.argmax())


def test_edits_and_allowed_bits_leave_the_row_as_it_is() -> None:
    row = logits(2, 70)
    edits = Edits(np.array([3, 69]), np.array([9.0, -np.inf], dtype=np.float32))
    flags = np.zeros(96, dtype=np.uint8)
    flags[[3, 64, 69]] = 1
    allowed = np.packbits(flags, bitorder="little").view(np.uint32)
    result = edited(row, Draw(row=0, edits=edits, allowed=allowed))
    assert result.isfinite().nonzero().flatten().tolist() == [3, 64]
    assert (float(result[3]), float(result[64])) == (9.0, float(row[64]))
    assert torch.equal(row, logits(2, 70))
