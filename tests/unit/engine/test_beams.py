"""Beam search against transformers' own, both on the logits of the same tiny model."""

from typing import Any

import pytest
import torch
import transformers
from support.beams import search_with_transformers
from support.checkpoints import TINY

from qinfer.engine.beams import BeamParams, BeamSearch, Hypothesis
from qinfer.errors import RequestError

PROMPT = [5, 80, 200, 17, 17, 90]
MAX_TOKENS = 9


def make_model(seed: int) -> Any:
    """Return a tiny model with end tokens likely enough to be among the candidates."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        special = {"vocab_size": 48, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
        config = transformers.LlamaConfig(**TINY | special)
        return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module", params=range(3))
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


def prompt_of(model: Any) -> list[int]:
    return [token % model.config.vocab_size for token in PROMPT]


def search(model: Any, params: BeamParams, end_ids: frozenset[int]) -> list[Hypothesis]:
    """Run our search, computing every beam's logits anew."""
    state = BeamSearch(params, params.max_tokens or 0, end_ids)
    going = True
    while going:
        sequences = [prompt_of(model) + list(beam.tokens) for beam in state.beams]
        with torch.inference_mode():
            logits = model(torch.tensor(sequences)).logits[:, -1]
        top = torch.log_softmax(logits.float(), -1).topk(min(state.num_candidates, 48))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        going = bool(state.step([list(zip(ids, vals, strict=True)) for ids, vals in pairs]))
    return state.results()


def oracle(
    model: Any, params: BeamParams, end_ids: frozenset[int]
) -> list[tuple[list[int], float]]:
    return search_with_transformers(model, prompt_of(model), params, end_ids)


@pytest.mark.parametrize("end_ids", [frozenset(), frozenset({1}), frozenset(range(1, 12))])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.5])
def test_sequences_and_scores_are_those_of_transformers(
    model: Any, end_ids: frozenset[int], early_stopping: Any, length_penalty: float
) -> None:
    params = BeamParams(
        beam_width=4,
        num_return_sequences=4,
        max_tokens=MAX_TOKENS,
        early_stopping=early_stopping,
        length_penalty=length_penalty,
    )
    ours, theirs = search(model, params, end_ids), oracle(model, params, end_ids)
    assert [list(entry.tokens) for entry in ours] == [tokens for tokens, _ in theirs]
    for entry, (_, score) in zip(ours, theirs, strict=True):
        assert entry.score == pytest.approx(score, rel=1e-6, abs=2e-5)


@pytest.mark.parametrize("beam_width", [2, 7])
def test_other_widths(beam_width: int) -> None:
    model = make_model(11)
    params = BeamParams(beam_width=beam_width, num_return_sequences=2, max_tokens=MAX_TOKENS)
    ours, theirs = search(model, params, frozenset({1})), oracle(model, params, frozenset({1}))
    assert [list(entry.tokens) for entry in ours] == [tokens for tokens, _ in theirs]


def test_the_end_of_a_sequence_is_told_apart_from_the_limit() -> None:
    search = BeamSearch(BeamParams(beam_width=2, num_return_sequences=2), 2, frozenset({9}))
    assert [(c.parent, c.token) for c in search.step([[(3, -0.1), (9, -0.2), (4, -3.0)]])] == [
        (0, 3),
        (0, 4),
    ]
    assert search.step([[(5, -0.1)], [(6, -0.1)]]) == []
    first, second = search.results()
    assert (first.tokens, first.stopped) == ((3, 5), False)
    assert (second.tokens, second.stopped) == ((9,), True)
    assert first.score == pytest.approx(-0.2 / 2)


def test_equal_scores_go_to_the_earlier_beam_and_the_lower_token() -> None:
    search = BeamSearch(BeamParams(beam_width=2), 5)
    search.step([[(7, -1.0), (3, -1.0), (5, -1.0)]])
    assert [beam.tokens for beam in search.beams] == [(3,), (5,)]


def test_a_stop_string_ends_a_beam() -> None:
    search = BeamSearch(
        BeamParams(beam_width=2, early_stopping=True), 5, stops=lambda tokens: tokens[-2:] == (1, 2)
    )
    search.step([[(1, -0.1), (3, -2.0)]])
    search.step([[(2, -0.1), (4, -0.2)], [(2, -0.5)]])
    assert search.finished[0].tokens == (1, 2)
    assert search.finished[0].stopped
    assert [beam.tokens for beam in search.beams] == [(1, 4), (3, 2)]


def test_fewer_tokens_than_beams() -> None:
    """A vocabulary, or a constraint, that offers less than the search could use."""
    search = BeamSearch(BeamParams(beam_width=4), 2)
    assert len(search.step([[(0, -0.5), (1, float("-inf"))]])) == 1
    assert search.step([[(0, -0.5)]]) == []
    assert [entry.tokens for entry in search.results()] == [(0, 0)]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"beam_width": 1}, "beam_width"),
        ({"beam_width": 65}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"num_return_sequences": 5}, "num_return_sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"stop": ("",)}, "stop"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ],
)
def test_invalid_parameters_are_named(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError) as caught:
        BeamParams(**fields)
    assert caught.value.field == name


def test_parameters_are_normalized() -> None:
    params = BeamParams(stop="end", stop_token_ids=[3])  # type: ignore[arg-type]
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3,)
