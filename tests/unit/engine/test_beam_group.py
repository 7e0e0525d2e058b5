"""Beam searches in the core: the result of a textbook search, whatever runs beside it."""

import pytest
import torch
from support.fake_engine import EOS, VOCAB, FakeRunner, drain, make_core, outputs, prompt_of

from qinfer.engine.admission import Limits
from qinfer.engine.beams import BeamParams, BeamSearch, Hypothesis
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import TokenEvent
from qinfer.errors import CapacityError, ContextLengthError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
FOUR = BeamParams(beam_width=4, num_return_sequences=4, max_tokens=10)


def expected(
    prompt: list[int], params: BeamParams, end_ids: frozenset[int] = frozenset({EOS})
) -> list[Hypothesis]:
    """Run the search on whole sequences, without engine and cache."""
    runner = FakeRunner(1)
    search = BeamSearch(params, params.max_tokens or 0, end_ids)
    going = True
    while going:
        rows = []
        for beam in search.beams:
            logprobs = runner.logits([*prompt, *beam.tokens]).log_softmax(-1)
            values, ids = logprobs.topk(min(search.num_candidates, VOCAB))
            rows.append(list(zip(ids.tolist(), values.tolist(), strict=True)))
        going = bool(search.step(rows))
    return search.results()


def check(events: list[TokenEvent], request_id: str, wanted: list[Hypothesis]) -> None:
    own = [event for event in events if event.request_id == request_id]
    assert [event.index for event in own] == list(range(len(wanted)))
    assert [event.token_ids for event in own] == [entry.tokens for entry in wanted]
    for event, entry in zip(own, wanted, strict=True):
        assert event.score == pytest.approx(entry.score)
        assert event.finish_reason == ("stop" if entry.stopped else "length")
        assert event.usage is not None
        assert event.usage.completion_tokens == len(entry.tokens)


@pytest.mark.parametrize("max_batch_tokens", [2, 7, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_the_result_of_a_textbook_search(max_batch_tokens: int, caching: bool) -> None:
    prompt = prompt_of(0, 13)
    core, _ = make_core(max_batch_tokens=max_batch_tokens, enable_prefix_caching=caching)
    core.add_request("b", prompt, FOUR)
    events = drain(core)
    check(events, "b", expected(prompt, FOUR))
    stats = core.stats()
    assert stats.generation_tokens == sum(len(event.token_ids) for event in events)
    assert sum(stats.finished.values()) == 4
    assert stats.prompt_tokens == 13


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_beams_that_end(early_stopping: bool | str) -> None:
    ends = frozenset(range(0, VOCAB, 6))
    limits = Limits(128, VOCAB, eos_ids=ends)
    params = BeamParams(
        beam_width=3,
        num_return_sequences=3,
        max_tokens=12,
        early_stopping=early_stopping,  # type: ignore[arg-type]
    )
    core, _ = make_core(limits=limits)
    for seed in range(4):
        core.add_request(str(seed), prompt_of(seed, 6), params)
    events = drain(core)
    for seed in range(4):
        check(events, str(seed), expected(prompt_of(seed, 6), params, ends))
    assert {event.finish_reason for event in events} >= {"stop"}


def test_beside_other_requests() -> None:
    """E02, E04: samples and searches in one batch are what they are alone."""
    core, _ = make_core(max_running=8)
    core.add_request("greedy", prompt_of(1, 9), GREEDY)
    core.add_request("beams", prompt_of(1, 9), FOUR)
    core.add_request("others", prompt_of(2, 5), FOUR)
    events = drain(core)
    alone, _ = make_core()
    alone.add_request("greedy", prompt_of(1, 9), GREEDY)
    assert outputs(events)[("greedy", 0)] == outputs(drain(alone))[("greedy", 0)]
    check(events, "beams", expected(prompt_of(1, 9), FOUR))
    check(events, "others", expected(prompt_of(2, 5), FOUR))


def test_beams_share_the_blocks_of_what_they_have_in_common() -> None:
    core, runner = make_core(max_batch_tokens=64)
    core.add_request("b", prompt_of(0, 40), FOUR)
    drain(core)
    assert core.scheduler.blocks.peak_used < 10 + 4 * 4  # ten of the prompt, and a tail each
    assert sum(runner.num_tokens) == 40 + 9 * 4


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_searches_start_again(caching: bool) -> None:
    """E16: two searches and two streams in a pool that does not hold them together."""
    core, _ = make_core(num_blocks=22, max_batch_tokens=16, enable_prefix_caching=caching)
    params = BeamParams(beam_width=3, num_return_sequences=2, max_tokens=14)
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    core.add_request("stream", prompt_of(5, 12), long)
    core.add_request("another", prompt_of(6, 12), long)
    core.add_request("one", prompt_of(1, 12), params)
    core.add_request("two", prompt_of(2, 12), params)
    events = drain(core)
    assert core.stats().preemptions > 0
    check(events, "one", expected(prompt_of(1, 12), params))
    check(events, "two", expected(prompt_of(2, 12), params))
    assert len(outputs(events)[("stream", 0)]) == len(outputs(events)[("another", 0)]) == 40


def test_a_search_gives_way_to_a_better_class() -> None:
    core, _ = make_core(num_blocks=24, max_batch_tokens=16, max_running=1)
    low = BeamParams(beam_width=3, max_tokens=14, priority=5)
    core.add_request("low", prompt_of(1, 12), low)
    for _ in range(5):
        core.step()
    core.add_request("high", prompt_of(2, 12), GREEDY)
    events = drain(core)
    assert core.stats().preemptions > 0
    assert [event.request_id for event in events][-1] == "low"
    check(events, "low", expected(prompt_of(1, 12), low))


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_aborted_searches_leave_nothing(num_steps: int) -> None:
    """E17: before, in and after the prompt."""
    core, _ = make_core(max_batch_tokens=16)
    core.add_request("b", prompt_of(0, 20), FOUR)
    for _ in range(num_steps):
        core.step()
    core.abort("b")
    core.check_integrity()
    assert drain(core) == []
    assert core.stats().finished == {"abort": 4}
    core.add_request("b", prompt_of(1, 5), FOUR)  # the id is free again
    check(drain(core), "b", expected(prompt_of(1, 5), FOUR))


def test_numbers_that_break_down_end_the_search() -> None:
    """G06"""
    core, _ = make_core(poison=61)
    core.add_request("bad", [1, 61, 2], FOUR)
    core.add_request("good", prompt_of(0, 9), GREEDY)
    events = drain(core)
    bad = [event for event in events if event.request_id == "bad"]
    assert [event.index for event in bad] == [0, 1, 2, 3]
    assert all(
        event.finish_reason == "error" and "layers.1" in (event.error or "") for event in bad
    )
    assert len(outputs(events)[("good", 0)]) == 12


def test_refusals() -> None:
    core, _ = make_core(num_blocks=12)
    with pytest.raises(CapacityError, match="4 times 24"):
        core.add_request("large", prompt_of(0, 15), FOUR)
    with pytest.raises(CapacityError):
        core.check(prompt_of(0, 15), FOUR)
    with pytest.raises(ContextLengthError):
        core.add_request("long", prompt_of(0, 15), BeamParams(max_tokens=200))
    core.add_request("x", prompt_of(0, 3), BeamParams(beam_width=2, max_tokens=3))
    with pytest.raises(RequestError, match="already in use"):
        core.add_request("x", prompt_of(0, 3), FOUR)
    assert len(drain(core)) == 1


def test_stop_strings_end_beams_and_are_left_out() -> None:
    prompt = prompt_of(3, 6)
    text = bytes(token + 32 for token in expected(prompt, FOUR)[0].tokens).decode()
    stop = text[1:3]
    core, _ = make_core()
    params = BeamParams(
        beam_width=4,
        num_return_sequences=4,
        max_tokens=10,
        stop=(stop,),
        ignore_eos=True,
        length_penalty=-1.0,
    )
    core.add_request("b", prompt, params)
    events = drain(core)
    stopped = [event for event in events if event.finish_reason == "stop"]
    assert stopped
    for event in stopped:
        assert bytes(token + 32 for token in event.token_ids).decode() == event.text + stop
    assert all(stop not in event.text for event in events)


def test_more_sequences_than_the_vocabulary_offers() -> None:
    core, _ = make_core(vocab_size=2, limits=Limits(32, 2))
    core.add_request("b", [0, 1], BeamParams(beam_width=4, num_return_sequences=4, max_tokens=1))
    events = drain(core)
    assert [event.index for event in events] == [0, 1, 2, 3]
    assert [len(event.token_ids) for event in events] == [1, 1, 0, 0]
    assert torch.tensor([event.score for event in events[:2]]).logsumexp(0).abs() < 1e-5


def test_static_batches_know_no_beams() -> None:
    core, _ = make_core(batching="static", enable_prefix_caching=False)
    with pytest.raises(RequestError, match="continuous"):
        core.add_request("b", [1, 2], FOUR)
