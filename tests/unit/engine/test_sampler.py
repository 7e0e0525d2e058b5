import math

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qinfer.engine.params import SamplingParams
from qinfer.engine.request import Request
from qinfer.engine.sampler import (
    SamplerState,
    draw,
    filters_of,
    keep_top_k,
    keep_top_p,
    sample,
    top_logprobs,
    uniform,
)

VOCAB = 500


def logits(seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def make(params: SamplingParams, tokens: list[int] | None = None, **fields) -> Request:
    tokens = tokens or [1, 2, 3]
    return Request(
        id="r", tokens=tokens, num_prompt=len(tokens), params=params, max_length=99, **fields
    )


def choose(row: torch.Tensor, request: Request) -> int:
    state = SamplerState(request, row.shape[0], "cpu")
    return sample(row.unsqueeze(0), [(0, request, state)])[0].token_id


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"top_p": 0.9999}, [TopPLogitsWarper(0.9999)]),
        ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
        (
            {"temperature": 1.5, "top_k": 50, "top_p": 0.7, "min_p": 0.01},
            [
                TemperatureLogitsWarper(1.5),
                TopKLogitsWarper(50),
                TopPLogitsWarper(0.7),
                MinPLogitsWarper(0.01),
            ],
        ),
    ],
)
def test_filters_leave_the_distribution_that_transformers_leaves(params, warpers) -> None:
    row = logits()
    ours = row
    for step in filters_of(SamplingParams(**params)):
        ours = step(ours)
    theirs = row.unsqueeze(0)
    for warper in warpers:
        theirs = warper(torch.tensor([[0]]), theirs)
    torch.testing.assert_close(ours.softmax(-1), theirs[0].softmax(-1), atol=1e-6, rtol=1e-4)


def test_repetition_penalty_is_that_of_transformers() -> None:
    row = logits(3)
    tokens = [5, 9, 5, 77, int(row.argmax())]
    params = SamplingParams(temperature=0.0, repetition_penalty=1.8)
    request = make(params, tokens)
    penalized = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([tokens]), row.unsqueeze(0))[0]
    assert choose(row, request) == int(penalized.argmax())
    assert choose(row, request) != int(row.argmax())


def test_the_history_grows_with_the_output() -> None:
    request = make(SamplingParams(temperature=0.0, repetition_penalty=5.0), [0])
    state = SamplerState(request, VOCAB, "cpu")
    row = logits(4).abs()
    order = torch.argsort(row, descending=True).tolist()
    for expected in order[:5]:
        token = state.choose(row)
        assert token == expected
        request.tokens.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-6, 9e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """E08: a tiny temperature equals greedy instead of overflowing."""
    row = logits(1)
    assert choose(row, make(SamplingParams(temperature=temperature))) == int(row.argmax())


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    """E08: fp32 logits divided by a small temperature must not turn into NaN."""
    row = logits(1) * 1e4
    (step,) = filters_of(SamplingParams(temperature=temperature))
    assert step(row).softmax(-1).isfinite().all()
    if temperature <= 1e-4:
        assert choose(row, make(SamplingParams(temperature=temperature))) == int(row.argmax())


def test_ties_go_to_the_lowest_id_in_greedy() -> None:
    """E02: the tie-break rule is fixed."""
    row = torch.zeros(VOCAB)
    row[[40, 7, 300]] = 5.0
    assert choose(row, make(SamplingParams(temperature=0.0))) == 7
    assert choose(row, make(SamplingParams(temperature=0.0, repetition_penalty=1.5), [1])) == 7


def test_ties_at_the_border_are_kept_together() -> None:
    row = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    assert keep_top_k(row, 2).isfinite().tolist() == [False, True, True, True, False]
    assert keep_top_p(row, 0.3).isfinite().tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("p", [1e-9, 0.5, 1.0 - 1e-7])
def test_top_p_keeps_at_least_one_and_looks_beyond_the_first_try(p: float) -> None:
    row = torch.zeros(2000)  # flat: half of the mass needs more than the first 256
    row[3] = 1e-3
    kept = int(keep_top_p(row, p).isfinite().sum())
    assert kept == (1 if p < 0.1 else 2000)


def test_draws_follow_the_distribution() -> None:
    row = torch.tensor([0.0, 1.0, 2.0, -torch.inf])
    counts = torch.zeros(4)
    for position in range(4000):
        counts[draw(row, uniform(1, 0, position))] += 1
    torch.testing.assert_close(counts / 4000, row.softmax(-1), atol=0.03, rtol=0)


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2**-53])
def test_the_ends_of_the_unit_interval_never_draw_the_impossible(number: float) -> None:
    row = torch.full((VOCAB,), -torch.inf)
    row[[17, 42]] = 0.3
    assert draw(row, number) in {17, 42}


def test_random_numbers_depend_on_seed_sample_and_position_only() -> None:
    """E07: a seed gives the same text whatever else runs, and every sample another one."""
    numbers = {(s, i, p): uniform(s, i, p) for s in (0, 7, -3) for i in (0, 1) for p in range(50)}
    assert len(set(numbers.values())) == len(numbers)
    assert all(0 <= number < 1 for number in numbers.values())
    assert numbers[(7, 1, 9)] == uniform(7, 1, 9)


def test_stop_tokens_are_masked_below_min_tokens() -> None:
    row = logits(5)
    best, second = torch.topk(row, 2).indices.tolist()
    params = SamplingParams(temperature=0.0, min_tokens=2)
    request = make(params, stop_ids=frozenset({best}))
    assert choose(row, request) == second
    request.tokens += [8, 8]
    assert choose(row, request) == best


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_those_of_the_model_and_exactly_as_many(count: int) -> None:
    """E10: raw log-softmax, the chosen token always there, exactly N others."""
    row = logits(6)
    expected = row.double().log_softmax(-1)
    result = top_logprobs(row, 13, count)
    assert result.token_id == 13
    assert result.logprob == pytest.approx(float(expected[13]), abs=1e-5)
    assert [token for token, _ in result.top] == torch.topk(expected, count).indices.tolist()
    assert all(value <= 0 for _, value in result.top)


def test_equal_logprobs_are_listed_by_id() -> None:
    row = torch.zeros(50)
    row[[30, 20, 10]] = 2.0
    assert [token for token, _ in top_logprobs(row, 0, 4).top] == [10, 20, 30, 0]


def test_logprobs_do_not_change_with_temperature_or_penalty() -> None:
    """E10: reported is the model's own distribution."""
    row = logits(7)
    seen = set()
    for temperature, penalty in ((0.0, 1.0), (0.01, 1.0), (2.0, 3.0)):
        params = SamplingParams(
            temperature=temperature, repetition_penalty=penalty, logprobs=2, seed=1
        )
        request = make(params)
        state = SamplerState(request, VOCAB, "cpu")
        (result,) = sample(row.unsqueeze(0), [(0, request, state)])
        assert result.logprob is not None
        seen.add(result.logprob.top)
        assert result.logprob.logprob == pytest.approx(
            float(row.log_softmax(-1)[result.token_id]), abs=1e-6
        )
    assert len(seen) == 1


def test_a_row_is_sampled_the_same_whatever_is_beside_it() -> None:
    """E02: bit-equal choices and log-probabilities, alone or among others."""
    rows = torch.stack([logits(seed) for seed in range(16)])
    kinds = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=1.3, top_p=0.9, seed=5, logprobs=3),
        SamplingParams(temperature=0.8, top_k=20, repetition_penalty=1.2, seed=6, logprobs=3),
    ]
    requests = [make(kinds[i % 3], seed=i) for i in range(16)]
    states = [SamplerState(request, VOCAB, "cpu") for request in requests]
    together = sample(rows, [(i, requests[i], states[i]) for i in range(16)])
    for i in range(16):
        alone = sample(rows[i : i + 1], [(0, requests[i], states[i])])
        assert alone == [together[i]]


def test_min_p_and_top_k_beyond_the_vocabulary_change_nothing() -> None:
    row = logits(8)
    assert torch.equal(keep_top_k(row, VOCAB + 1), row)
    assert math.isfinite(float(row.sum()))
