"""The engine on a fake model whose logits depend on every token in the cache."""

import pytest
import torch
from support.fake_engine import EOS, VOCAB, drain, make_core, outputs, prompt_of

from qinfer.engine.admission import Limits
from qinfer.engine.params import SamplingParams
from qinfer.errors import CapacityError, OverloadedError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def solo(prompt: list[int], params: SamplingParams) -> list[int]:
    """Run one request alone, in one chunk, with ample memory and no prefix cache."""
    core, _ = make_core(max_batch_tokens=1000, enable_prefix_caching=False)
    core.add_request("solo", prompt, params)
    return outputs(drain(core))[("solo", 0)]


def test_greedy_output_is_that_of_a_plain_loop() -> None:
    core, runner = make_core()
    prompt = prompt_of(0, 21)
    core.add_request("a", prompt, GREEDY)
    tokens = list(prompt)
    for _ in range(12):
        tokens.append(int(runner.logits(tokens).argmax()))
    assert outputs(drain(core))[("a", 0)] == tokens[21:]


@pytest.mark.parametrize("max_batch_tokens", [1, 7, 16, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_chunk_size_and_prefix_cache_change_nothing(max_batch_tokens: int, caching: bool) -> None:
    core, _ = make_core(max_batch_tokens=max_batch_tokens, enable_prefix_caching=caching)
    prompts = [prompt_of(1, 20) + prompt_of(seed, 5) for seed in range(4)]
    for index, prompt in enumerate(prompts):
        core.add_request(str(index), prompt, GREEDY)
    result = outputs(drain(core))
    for index, prompt in enumerate(prompts):
        assert result[(str(index), 0)] == solo(prompt, GREEDY)


def test_small_pool_gives_the_same_text_as_ample_memory() -> None:
    """E16: three requests of 16 + 24 tokens in 12 blocks of 4; a 60-token one is refused."""
    core, _ = make_core(num_blocks=12, max_batch_tokens=16)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
    prompts = [prompt_of(seed, 16) for seed in range(3)]
    for index, prompt in enumerate(prompts):
        core.add_request(str(index), prompt, params)
    with pytest.raises(CapacityError, match="the cache holds 48"):
        core.add_request("large", prompt_of(9, 36), params)
    events = drain(core)
    result = outputs(events)
    for index, prompt in enumerate(prompts):
        assert result[(str(index), 0)] == solo(prompt, params)
        assert len(result[(str(index), 0)]) == 24
    stats = core.stats()
    assert stats.preemptions > 0
    assert stats.generation_tokens == 72
    assert stats.finished == {"length": 3}
    assert all(event.usage.cached_tokens == 0 for event in events if event.usage)


def test_aborted_while_waiting_is_never_computed() -> None:
    """E17: batch limit 1; B queued then dropped; prefill must not include B."""
    core, runner = make_core(max_running=1)
    core.add_request("a", prompt_of(0, 4), GREEDY)
    core.step()
    core.add_request("b", prompt_of(1, 9), GREEDY)
    core.abort("b")
    events = drain(core)
    assert {event.request_id for event in events} == {"a"}
    assert sum(runner.num_tokens) == 4 + 11
    assert core.stats().finished == {"abort": 1, "length": 1}


def test_aborted_while_running_frees_its_blocks() -> None:
    """E17: a running request is gone at once, and the others do not notice."""
    core, _ = make_core()
    core.add_request("a", prompt_of(0, 9), GREEDY)
    core.add_request("b", prompt_of(1, 9), GREEDY)
    core.step()
    core.step()
    used = core.scheduler.blocks.num_used
    core.abort("a")
    core.abort("a")
    core.abort("unknown")
    assert core.scheduler.blocks.num_used < used
    core.add_request("a", prompt_of(2, 5), GREEDY)  # the id is free again
    result = outputs(drain(core))
    assert result[("a", 0)] == solo(prompt_of(2, 5), GREEDY)


def test_a_duplicate_id_is_refused_without_harm() -> None:
    """E18: the same request id twice must not kill the engine or mix results."""
    core, _ = make_core()
    core.add_request("x", prompt_of(0, 5), GREEDY)
    with pytest.raises(RequestError, match="already in use"):
        core.add_request("x", prompt_of(1, 5), GREEDY)
    assert outputs(drain(core))[("x", 0)] == solo(prompt_of(0, 5), GREEDY)


def test_parameters_and_history_stay_with_their_request() -> None:
    """E04: greedy, seeded and penalized requests in one batch, one of which leaves early."""
    kinds = {
        "greedy": SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        "seeded": SamplingParams(temperature=1.0, seed=11, max_tokens=5, ignore_eos=True),
        "penalized": SamplingParams(
            temperature=0.0, repetition_penalty=5.0, max_tokens=20, ignore_eos=True
        ),
    }
    core, _ = make_core()
    for name, params in kinds.items():
        core.add_request(name, prompt_of(4, 6), params)
    result = outputs(drain(core))
    for name, params in kinds.items():
        assert result[(name, 0)] == solo(prompt_of(4, 6), params)
    greedy = result[("greedy", 0)]
    assert result[("seeded", 0)] != greedy[:5]
    assert result[("penalized", 0)] != greedy


def test_seeds() -> None:
    """E07: no seed differs each time; n with one seed gives n texts, the same set twice."""
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    core, _ = make_core()
    for index in range(5):
        core.add_request(str(index), [1, 2], params)
    assert len(set(map(tuple, outputs(drain(core)).values()))) > 1

    seeded = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=7, n=4)
    sets = []
    for companions in (0, 6):
        core, _ = make_core(max_running=3)
        for index in range(companions):
            core.add_request(f"other-{index}", [5], params)
        core.add_request("n", [1, 2], seeded)
        result = outputs(drain(core))
        sets.append([tuple(result[("n", index)]) for index in range(4)])
    assert len(set(sets[0])) == 4
    assert sets[0] == sets[1]


def test_engine_seed_repeats_a_run_without_repeating_a_text() -> None:
    """E07: an engine-wide seed must not make all samples alike."""
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    runs = []
    for _ in range(2):
        core, _ = make_core(seed=0)
        for index in range(3):
            core.add_request(str(index), [1, 2], params)
        runs.append(outputs(drain(core)))
    assert runs[0] == runs[1]
    assert len(set(map(tuple, runs[0].values()))) == 3


def test_no_tokens_wanted_ends_at_once() -> None:
    """E12: `max_tokens` 0 answers with nothing instead of killing the engine."""
    core, runner = make_core()
    core.add_request("zero", [1, 2], SamplingParams(max_tokens=0, n=2))
    events = drain(core)
    assert [(e.index, e.text, e.finish_reason) for e in events] == [
        (0, "", "length"),
        (1, "", "length"),
    ]
    assert runner.num_tokens == []
    core.add_request("gone", [1, 2], SamplingParams(max_tokens=0))
    core.abort("gone")
    assert drain(core) == []


def test_a_broken_row_ends_its_request_and_no_other() -> None:
    """G06: non-finite logits are an error that names the layer, not a stream of token 0."""
    core, _ = make_core(poison=61)
    core.add_request("good", prompt_of(0, 9), GREEDY)
    core.add_request("bad", [1, 61, 2], GREEDY)
    events = drain(core)
    (last,) = [event for event in events if event.request_id == "bad"]
    assert last.finish_reason == "error"
    assert last.token_ids == ()
    assert last.error is not None
    assert "model.layers.1" in last.error
    assert "dtype" in last.error
    assert outputs(events)[("good", 0)] == solo(prompt_of(0, 9), GREEDY)


def test_eos_and_stop_tokens() -> None:
    core, _ = make_core()
    prompt = prompt_of(3, 5)
    free = solo(prompt, GREEDY)
    core.add_request(
        "stop", prompt, SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(free[4],))
    )
    events = drain(core)
    assert outputs(events)[("stop", 0)] == free[: free.index(free[4]) + 1]
    assert events[-1].finish_reason == "stop"
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == free.index(free[4]) + 1

    limits = Limits(128, VOCAB, eos_ids=frozenset({free[2], EOS}))
    for ignore, expected in ((False, free.index(free[2]) + 1), (True, 12)):
        core, _ = make_core(limits=limits)
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=ignore)
        core.add_request("eos", prompt, params)
        assert len(outputs(drain(core))[("eos", 0)]) == expected


@pytest.mark.parametrize("max_logit_rows", [None, 3])
@pytest.mark.parametrize("max_batch_tokens", [5, 16, 100])
def test_scores_cover_every_position_once_in_order(max_batch_tokens, max_logit_rows) -> None:
    core, runner = make_core(max_batch_tokens=max_batch_tokens, max_logit_rows=max_logit_rows)
    tokens = prompt_of(2, 30)
    rows: list[torch.Tensor] = []

    def sink(position: int, new: torch.Tensor) -> None:
        assert position == sum(row.shape[0] for row in rows)
        rows.append(new)

    core.add_score("s", tokens, sink)
    core.add_request("beside", prompt_of(8, 5), GREEDY)
    drain(core)
    expected = torch.stack([runner.logits(tokens[: n + 1]) for n in range(29)]).log_softmax(-1)
    torch.testing.assert_close(torch.cat(rows), expected)


def test_scoring_survives_preemption_without_repeating_rows() -> None:
    """E16: recomputed positions are not handed over twice."""
    core, _ = make_core(num_blocks=10, max_batch_tokens=8, max_logit_rows=2)
    core.add_request(
        "first", prompt_of(0, 4), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    )
    core.step()
    tokens = prompt_of(2, 21)
    positions: list[int] = []
    core.add_score("s", tokens, lambda at, new: positions.extend(range(at, at + new.shape[0])))
    drain(core)
    assert core.stats().preemptions > 0
    assert positions == list(range(20))


def test_scoring_takes_prefix_hits_only_when_asked_and_before_the_start() -> None:
    tokens = prompt_of(2, 30)
    core, runner = make_core(max_batch_tokens=100)
    core.add_request("warm", tokens, GREEDY)
    drain(core)
    for use, start, computed in ((False, 21, 29), (True, 1, 29), (True, 21, 9)):
        before = sum(runner.num_tokens)
        got: list[int] = []

        def sink(position: int, rows: torch.Tensor, got: list[int] = got) -> None:
            got.extend(range(position, position + rows.shape[0]))

        core.add_score("s", tokens, sink, start=start, use_prefix_cache=use)
        drain(core)
        assert sum(runner.num_tokens) - before == computed
        assert got == list(range(start - 1, 29))


def test_a_failing_sink_leaves_the_books_in_order() -> None:
    core, _ = make_core()

    def sink(position: int, rows: torch.Tensor) -> None:
        raise ValueError("foreign code")

    core.add_score("s", prompt_of(0, 5), sink)
    core.add_request("other", prompt_of(1, 5), GREEDY)
    with pytest.raises(ValueError, match="foreign code"):
        core.step()
    core.abort("s")
    assert outputs(drain(core))[("other", 0)] == solo(prompt_of(1, 5), GREEDY)[1:]


def test_prefix_hits_are_counted_and_reported_in_usage() -> None:
    core, _ = make_core(max_batch_tokens=100)
    cached = []
    for index in range(3):
        core.add_request(str(index), prompt_of(0, 18), GREEDY)
        cached += [event.usage.cached_tokens for event in drain(core) if event.usage]
    assert cached == [0, 16, 16]
    stats = core.stats()
    assert (stats.prefix_hit_tokens, stats.prefix_query_tokens) == (32, 54)
    assert stats.prompt_tokens == 54
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_blocks == stats.num_blocks


@pytest.mark.parametrize("caching", [True, False])
def test_samples_compute_their_prompt_once(caching: bool) -> None:
    """The prompt, its last token once more per further sample, and the outputs but the last."""
    params = SamplingParams(temperature=1.0, seed=7, n=4, max_tokens=6, ignore_eos=True)
    core, runner = make_core(enable_prefix_caching=caching)
    core.add_request("n", prompt_of(0, 22), params)
    together = outputs(drain(core))
    assert sum(runner.num_tokens) == 22 + 3 + 4 * 5
    assert core.stats().computed_tokens == sum(runner.num_tokens)
    one_by_one, _ = make_core(max_running=1, enable_prefix_caching=False)
    one_by_one.add_request("n", prompt_of(0, 22), params)
    assert outputs(drain(one_by_one)) == together
    assert len(set(map(tuple, together.values()))) == 4


def test_samples_survive_preemption() -> None:
    """E16: a preempted sample shares its prompt again, and its text stays what it was."""
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=20, ignore_eos=True)
    texts = []
    for num_blocks in (64, 11):
        core, _ = make_core(num_blocks=num_blocks, enable_prefix_caching=False)
        core.add_request("n", prompt_of(0, 18), params)
        texts.append(outputs(drain(core)))
    assert core.stats().preemptions > 0
    assert texts[0] == texts[1]


def test_priority_changes_the_order_and_no_text() -> None:
    core, _ = make_core(num_blocks=12, max_running=2)
    prompts = {name: prompt_of(seed, 14) for seed, name in enumerate(("low", "mid", "high"))}
    params = {
        name: SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, priority=priority)
        for name, priority in (("low", 9), ("mid", 5), ("high", -1))
    }
    ends = []
    for name, prompt in prompts.items():
        core.add_request(name, prompt, params[name])
    result: dict[str, list[int]] = {}
    while core.has_unfinished:
        for event in core.step():
            result.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason:
                ends.append(event.request_id)
    assert ends == ["high", "mid", "low"]
    for name, prompt in prompts.items():
        assert result[name] == solo(prompt, params[name])


def test_a_full_queue_refuses_and_leaves_nothing_behind() -> None:
    """S04: more than may wait is refused; the samples of one prompt come in together."""
    core, _ = make_core(max_running=1, max_queue=1)
    core.add_request("a", [1, 2], SamplingParams(max_tokens=2, n=3))
    before = core.stats()
    with pytest.raises(OverloadedError, match="max_queue"):
        core.add_request("b", [1, 2], GREEDY)
    assert core.stats() == before
    drain(core)
    core.add_request("b", [1, 2], GREEDY)
    drain(core)
