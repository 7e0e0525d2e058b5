"""Sampling of requests against transformers' processors and textbook loops, in both backends."""

from typing import Any

import pytest
import torch
from support.fake_engine import ByteTokenizer
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from qinfer.engine.params import SamplingParams, StructuredOutput
from qinfer.engine.request import Request
from qinfer.engine.sampler import Sampled, Sampler, bad_word_ids, uniform
from qinfer.kernels import sampling
from qinfer.kernels.cpu import native
from qinfer.kernels.sampling import Draw
from qinfer.kvcache.inputs import ModelOutput

VOCAB = 500


@pytest.fixture(params=["C++", "torch"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with the kernel and with the reference."""
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: None)
    elif native.load() is None:
        pytest.skip("the C++ library was not built (no compiler at installation)")


def logits(seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def make(params: SamplingParams, tokens: list[int] | None = None, **fields: Any) -> Request:
    tokens = [1, 2, 3] if tokens is None else tokens
    fields = {"num_prompt": len(tokens), **fields}
    return Request(id="r", tokens=tokens, params=params, max_length=99, **fields)


def sampler_of(vocab: int = VOCAB) -> Sampler:
    return Sampler(ByteTokenizer(), vocab_size=vocab, eos_ids={63})


def sample(rows: torch.Tensor, requests: list[Request], *, told: bool = False) -> list[Sampled]:
    """Return the choices of fresh requests; `told`: the model says what is most likely."""
    sampler = sampler_of(rows.shape[1])
    bad_layers = torch.full((len(rows),), -1)
    output = ModelOutput(rows, bad_layers, rows.argmax(-1) if told else None)
    return sampler.sample(output, [(i, sampler.start(r)) for i, r in enumerate(requests)])


def choose(row: torch.Tensor, request: Request) -> int:
    return sample(row.unsqueeze(0), [request])[0].token_id


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **fields)


def test_repetition_penalty_is_that_of_transformers() -> None:
    row = logits(3)
    tokens = [5, 9, 5, 77, int(row.argmax())]
    request = make(greedy(repetition_penalty=1.8), tokens, num_prompt=2)
    penalized = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([tokens]), row.unsqueeze(0))[0]
    assert choose(row, request) == int(penalized.argmax())
    assert choose(row, request) != int(row.argmax())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_all_changes_of_the_row_in_a_textbook_loop(temperature: float) -> None:
    """E04: each output token in turn, with everything that a request can change in its row."""
    params = SamplingParams(
        temperature=temperature,
        repetition_penalty=1.3,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        logit_bias={7: 5.0, 8: -100.0, 400: 2.5},
        allowed_token_ids=tuple(range(3, 450)),
        min_tokens=6,
        seed=5,
    )
    request = make(params, [3, 4, 7, 200], stop_ids=frozenset({50, 51}), seed=5)
    sampler = sampler_of()
    state = sampler.start(request)
    for step in range(12):
        row = logits(step) * 0.5
        changed = row.clone()
        for token, bias in ((7, 5.0), (8, -100.0), (400, 2.5)):
            changed[token] += bias
        if step < 6:
            changed[[50, 51]] = -torch.inf
        changed[:3] = changed[450:] = -torch.inf
        output = request.tokens[4:]
        for token in set(request.tokens):
            changed[token] *= 1 / 1.3 if changed[token] > 0 else 1.3
        for token in set(output):
            changed[token] -= 0.4 * output.count(token) + 0.7
        if temperature:
            draw = Draw(row=0, number=uniform(5, 0, step), temperature=temperature)
            expected = sampling.choose(changed, draw)
        else:
            expected = int(changed.argmax())
        result = sampler.sample(ModelOutput(row[None], torch.tensor([-1])), [(0, state)])
        assert result[0].token_id == expected
        request.tokens.append(expected)


def test_the_history_grows_with_the_output() -> None:
    """A token that was drafted and judged is seen by the next row, and not twice later."""
    request = make(greedy(frequency_penalty=2.0), [0])
    sampler = sampler_of(40)
    state = sampler.start(request)
    row = torch.arange(40, dtype=torch.float32)
    output = ModelOutput(row[None], torch.tensor([-1]))
    chosen = []
    for _ in range(6):
        chosen.append(sampler.sample(output, [(0, state)])[0].token_id)
        request.tokens.append(chosen[-1])
    assert chosen == [39, 38, 37, 39, 36, 38]  # 39 costs 2 once it was there, then 4
    del request.tokens[-2:]
    request.tokens += [36, 38]
    assert sampler.sample(output, [(0, state)])[0].token_id == 35


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-6, 9e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """E08: a tiny temperature equals greedy instead of overflowing."""
    row = logits(1)
    assert choose(row, make(SamplingParams(temperature=temperature))) == int(row.argmax())


def test_ties_go_to_the_lowest_id_in_greedy() -> None:
    """E02: the tie-break rule is fixed."""
    row = torch.zeros(VOCAB)
    row[[40, 7, 300]] = 5.0
    assert choose(row, make(greedy())) == 7
    assert choose(row, make(greedy(repetition_penalty=1.5), [1])) == 7


def test_random_numbers_depend_on_seed_sample_and_position_only() -> None:
    """E07: a seed gives the same text whatever else runs, and every sample another one."""
    numbers = {(s, i, p): uniform(s, i, p) for s in (0, 7, -3) for i in (0, 1) for p in range(50)}
    assert len(set(numbers.values())) == len(numbers)
    assert all(0 <= number < 1 for number in numbers.values())
    assert numbers[(7, 1, 9)] == uniform(7, 1, 9)


def test_stop_tokens_are_masked_below_min_tokens() -> None:
    row = logits(5)
    best, second = torch.topk(row, 2).indices.tolist()
    request = make(greedy(min_tokens=2), stop_ids=frozenset({best}))
    assert choose(row, request) == second
    request.tokens += [8, 8]
    assert choose(row, request) == best


def test_bans_alone_do_not_leave_a_request_without_a_token() -> None:
    request = make(greedy(min_tokens=2, allowed_token_ids=(9,)), stop_ids=frozenset({9}))
    assert choose(logits(), request) == 9


def test_a_request_without_a_token_to_choose_fails_alone() -> None:
    """What is left of allowed tokens and of the grammar has nothing in common."""
    hopeless = make(greedy(allowed_token_ids=(9,), structured=StructuredOutput(choice=("a",))))
    row = logits(0, 64)
    failed, fine = sample(torch.stack([row, row]), [hopeless, make(greedy())])
    assert failed.token_id == -1
    assert "no token is left to choose" in str(failed.error)
    assert fine == Sampled(int(row.argmax()), None)


def test_bad_words_are_never_completed() -> None:
    """Against transformers' processor, over the output alone, as vLLM does it."""
    words = [(7,), (3, 4), (3, 5, 6)]
    tokens = [3, 4, 3, 5]
    sampler = sampler_of(64)
    for cut in range(5):
        row = logits(cut, 64)
        row[[4, 6, 7]] += 20.0
        request = make(greedy(bad_words=("'", "#$", "#%&")), tokens[:cut], num_prompt=0)
        assert bad_word_ids(request.params.bad_words, ByteTokenizer())[::2] == words
        # transformers wants a token before; one that no word has
        history = torch.tensor([[60, *tokens[:cut]]])
        processor = NoBadWordsLogitsProcessor([list(word) for word in words])
        expected = processor(history, row.unsqueeze(0))[0]
        state = sampler.start(request)
        (result,) = sampler.sample(ModelOutput(row[None], torch.tensor([-1])), [(0, state)])
        assert result.token_id == int(expected.argmax())


def test_logprobs_do_not_change_with_temperature_or_penalty() -> None:
    """E10: reported is the model's own distribution."""
    row = logits(7)
    seen = set()
    for temperature, penalty in ((0.0, 1.0), (0.01, 1.0), (2.0, 3.0)):
        params = SamplingParams(
            temperature=temperature, repetition_penalty=penalty, logprobs=2, seed=1
        )
        (result,) = sample(row.unsqueeze(0), [make(params)])
        assert result.logprob is not None
        seen.add(result.logprob.top)
        assert result.logprob.logprob == pytest.approx(
            float(row.log_softmax(-1)[result.token_id]), abs=1e-6
        )
    assert len(seen) == 1


@pytest.mark.parametrize("told", [True, False])
def test_a_row_is_sampled_the_same_whatever_is_beside_it(told: bool) -> None:
    """E02: bit-equal choices and log-probabilities, alone or among others."""
    rows = torch.stack([logits(seed) for seed in range(16)])
    kinds = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=1.3, top_p=0.9, seed=5, logprobs=3),
        SamplingParams(temperature=0.8, top_k=20, repetition_penalty=1.2, seed=6, logprobs=3),
        SamplingParams(temperature=0.8, typical_p=0.7, seed=6, logprobs=3),
    ]
    together = sample(rows, [make(kinds[i % 4], seed=i) for i in range(16)], told=told)
    for i in range(16):
        alone = sample(rows[i : i + 1], [make(kinds[i % 4], seed=i)], told=told)
        assert alone == [together[i]]


def test_the_model_s_own_argmax_is_taken_for_plain_requests() -> None:
    rows = torch.stack([logits(1), logits(2)])
    told = ModelOutput(rows, torch.tensor([-1, -1]), torch.tensor([17, 18]))
    sampler = sampler_of()
    plain = sampler.start(make(greedy()))
    edited = sampler.start(make(greedy(logit_bias={17: -1.0})))
    choices = sampler.sample(told, [(1, plain), (0, edited), (0, plain)])
    assert [choice.token_id for choice in choices] == [18, int(rows[0].argmax()), 17]
    assert sampler.sample(told, []) == []
