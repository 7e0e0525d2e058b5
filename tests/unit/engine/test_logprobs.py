import random
from dataclasses import replace

import pytest
import torch
from support.fake_engine import drain, make_core, outputs

from qinfer.engine.logprobs import top_logprobs
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import TokenLogprob


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_those_of_the_model_and_exactly_as_many(count: int) -> None:
    """E10: raw log-softmax, the chosen token always there, exactly N others."""
    row = torch.randn(500, generator=torch.Generator().manual_seed(6)) * 3
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


def solo_scores(core, runner, prompt: list[int], count: int) -> list[TokenLogprob | None]:
    rows = [
        top_logprobs(runner.logits(prompt[:i]), prompt[i], count) for i in range(1, len(prompt))
    ]
    return [None, *rows]


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
@pytest.mark.parametrize("max_logit_rows", [2, 5, None])
def test_prompt_logprobs_are_those_of_every_prefix(max_tokens: int, max_logit_rows: int) -> None:
    """E10, E12: whatever the chunks, beside others, with blocks of the prompt in the cache."""
    core, runner = make_core(max_batch_tokens=7, max_logit_rows=max_logit_rows)
    prompt = random.Random(1).choices(range(60), k=19)
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    core.add_request("warm", prompt, greedy)
    plain = outputs(drain(core))[("warm", 0)]
    core.add_request("beside", prompt[3:], greedy)
    params = replace(greedy, max_tokens=max_tokens, prompt_logprobs=2, n=2)
    core.check(prompt, params)
    core.add_request("scored", prompt, params)
    core.add_request("one", prompt[:1], replace(params, n=1))
    events = drain(core)
    told = {(e.request_id, e.index): e for e in events if e.prompt_logprobs is not None}
    assert told.keys() == {("scored", 0), ("one", 0)}
    assert list(told[("scored", 0)].prompt_logprobs or ()) == solo_scores(core, runner, prompt, 2)
    assert told[("one", 0)].prompt_logprobs == (None,)
    texts = outputs(events)
    assert texts[("scored", 0)] == texts[("scored", 1)] == plain[:max_tokens]
    last = [e for e in events if e.request_id == "scored" and e.finish_reason]
    assert [e.finish_reason for e in last] == ["length", "length"]
    assert all(e.usage.prompt_tokens == 19 for e in last if e.usage)


def test_prompt_logprobs_survive_preemption() -> None:
    """E16: no row is told twice, none is missing."""
    core, runner = make_core(num_blocks=12, max_batch_tokens=5, max_logit_rows=3)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, prompt_logprobs=0)
    prompts = [random.Random(seed).choices(range(60), k=16) for seed in range(3)]
    for index, prompt in enumerate(prompts):
        core.add_request(str(index), prompt, params)
    events = drain(core)
    assert core.stats().preemptions > 0
    told = [event for event in events if event.prompt_logprobs is not None]
    assert len(told) == 3
    for event in told:
        prompt = prompts[int(event.request_id)]
        assert list(event.prompt_logprobs or ()) == solo_scores(core, runner, prompt, 0)


def test_a_prompt_that_breaks_down_ends_with_an_error() -> None:
    core, _ = make_core(poison=9)
    core.add_request("bad", [1, 9, 2, 3], SamplingParams(prompt_logprobs=1))
    (event,) = drain(core)
    assert (event.finish_reason, event.prompt_logprobs) == ("error", None)
    assert "model.layers.1" in str(event.error)
