"""Drafts change no token: the fake engine with drafters that are right, wrong or both."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.fake_engine import EOS, VOCAB, FakeRunner, Ticks, drain, make_core, outputs, prompt_of

from qinfer.engine.admission import Limits
from qinfer.engine.core import EngineCore
from qinfer.engine.drafting import NgramDrafter
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import Request, TokenEvent
from qinfer.engine.speculation import Speculator

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)


class Oracle:
    """Drafts what will come, but for a share of wrong tokens."""

    def __init__(self, truth: dict[str, list[int]], *, wrong: float = 0.0) -> None:
        self.truth = truth
        self.random = random.Random(0)
        self.wrong = wrong
        self.known: set[str] = set()

    def prepare(self, requests: Sequence[Request]) -> Sequence[Request]:
        self.known |= {request.id for request in requests}
        return requests

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        drafts = []
        for request, length in zip(requests, lengths, strict=True):
            truth = self.truth[request.id][request.num_output :][:length]
            drafts.append([self._spoil(token) for token in truth])
        return drafts

    def forget(self, request_id: str) -> None:
        self.known.discard(request_id)

    def _spoil(self, token: int) -> int:
        return (token + 1) % (VOCAB - 1) if self.random.random() < self.wrong else token


def solo(prompt: list[int], params: SamplingParams, **options: Any) -> list[int]:
    """Run one request alone without drafts."""
    core, _ = make_core(max_batch_tokens=1000, **options)
    core.add_request("solo", prompt, params)
    return outputs(drain(core))[("solo", 0)]


def speculating(
    prompts: dict[str, list[int]],
    params: dict[str, SamplingParams],
    *,
    wrong: float = 0.0,
    length: int = 4,
    **options: Any,
) -> tuple[EngineCore, FakeRunner, Oracle]:
    """Return an engine that holds the requests and knows their texts in advance."""
    truth = {name: solo(prompt, params[name]) for name, prompt in prompts.items()}
    oracle = Oracle(truth, wrong=wrong)
    speculator = Speculator(oracle, length, clock=Ticks())
    core, runner = make_core(speculator=speculator, **options)
    for name, prompt in prompts.items():
        core.add_request(name, prompt, params[name])
    return core, runner, oracle


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_right_draft_saves_steps_and_changes_nothing(params: SamplingParams) -> None:
    prompt = prompt_of(0, 9)
    core, runner, oracle = speculating({"a": prompt}, {"a": params})
    events = drain(core)
    assert outputs(events)[("a", 0)] == solo(prompt, params)
    assert [len(event.token_ids) for event in events] == [1, 1, 1, 5, 5, 5, 2]
    # Two steps show what a plain one costs; the last draft is cut at max_tokens.
    assert runner.num_tokens == [9, 1, 1, 5, 5, 5, 2]
    stats = core.stats()
    assert (stats.draft_tokens, stats.accepted_draft_tokens) == (13, 13)
    assert stats.generation_tokens == 20
    assert not oracle.known


@pytest.mark.parametrize("wrong", [0.3, 1.0])
@pytest.mark.parametrize("max_batch_tokens", [3, 16])
@pytest.mark.parametrize("caching", [True, False])
def test_wrong_drafts_among_batch_mates(wrong: float, max_batch_tokens: int, caching: bool) -> None:
    """E02, E04: greedy, drawn and penalized requests, with drafts and small budgets."""
    kinds = [
        GREEDY,
        DRAWN,
        SamplingParams(temperature=0.0, repetition_penalty=3.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=9, top_p=0.9, seed=2, max_tokens=13, ignore_eos=True),
    ]
    prompts = {str(i): prompt_of(7, 8) + prompt_of(i, 3) for i in range(6)}
    params = {str(i): kinds[i % 4] for i in range(6)}
    core, _, _ = speculating(
        prompts,
        params,
        wrong=wrong,
        max_batch_tokens=max_batch_tokens,
        enable_prefix_caching=caching,
    )
    result = outputs(drain(core))
    for name, prompt in prompts.items():
        assert result[(name, 0)] == solo(prompt, params[name])
    if max_batch_tokens == 16:
        assert core.stats().draft_tokens > 0


def test_preemption_with_drafts() -> None:
    """E16: a small pool gives the same texts, drawn ones too, with drafts in flight."""
    params = {
        str(i): SamplingParams(temperature=1.0, seed=i, max_tokens=24, ignore_eos=True)
        for i in range(3)
    }
    prompts = {str(i): prompt_of(i, 16) for i in range(3)}
    core, _, _ = speculating(prompts, params, wrong=0.2, num_blocks=12)
    result = outputs(drain(core))
    for name, prompt in prompts.items():
        assert result[(name, 0)] == solo(prompt, params[name])
    assert core.stats().preemptions > 0
    assert core.stats().accepted_draft_tokens > 0


def test_logprobs_and_texts_come_with_every_token() -> None:
    """E10: one entry per token, also when several come at once."""
    params = SamplingParams(temperature=1.0, seed=3, logprobs=2, max_tokens=12, ignore_eos=True)
    prompt = prompt_of(1, 6)
    plain, _ = make_core()
    plain.add_request("a", prompt, params)
    core, _, _ = speculating({"a": prompt}, {"a": params}, wrong=0.3)
    expected, got = drain(plain), drain(core)
    assert len(got) < len(expected)
    assert all(len(event.logprobs or ()) == len(event.token_ids) for event in got)
    for field in ("logprobs", "token_ids"):
        assert _joined(got, field) == _joined(expected, field)
    assert "".join(e.text for e in got) == "".join(e.text for e in expected)


def _joined(events: Sequence[TokenEvent], name: str) -> list[Any]:
    return [entry for event in events for entry in getattr(event, name) or ()]


def test_ends_within_a_draft() -> None:
    """Stop tokens, stop strings, EOS and min_tokens: nothing behind the end comes out."""
    prompt = prompt_of(3, 5)
    free = solo(prompt, GREEDY)
    text = bytes(token + 32 for token in free).decode()
    limits = Limits(128, VOCAB, eos_ids=frozenset({free[6], EOS}))
    kinds: list[tuple[SamplingParams, dict[str, Any]]] = [
        (SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(free[7],)), {}),
        (SamplingParams(temperature=0.0, max_tokens=20, stop=(text[8:10],)), {}),
        (SamplingParams(temperature=0.0, max_tokens=20), {"limits": limits}),
        (SamplingParams(temperature=0.0, max_tokens=20, min_tokens=9), {"limits": limits}),
        (SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), {}),
    ]
    for params, options in kinds:
        plain, _ = make_core(**options)
        plain.add_request("a", prompt, params)
        expected = drain(plain)
        oracle = Oracle({"a": outputs(expected)[("a", 0)] + [1, 2, 3, 4]})
        core, _ = make_core(speculator=Speculator(oracle, 4, clock=Ticks()), **options)
        core.add_request("a", prompt, params)
        got = drain(core)
        assert _joined(got, "token_ids") == _joined(expected, "token_ids")
        assert "".join(e.text for e in got) == "".join(e.text for e in expected)
        assert got[-1].finish_reason == expected[-1].finish_reason
        assert got[-1].usage == expected[-1].usage
        assert core.stats().generation_tokens == plain.stats().generation_tokens


def test_a_poisonous_draft_harms_nobody() -> None:
    """G06: rows behind a wrong draft may be anything; only an accepted token's row counts."""
    prompt = prompt_of(0, 9)
    truth = solo(prompt, GREEDY)
    assert 61 not in truth
    oracle = Oracle({"a": [token if i % 3 else 61 for i, token in enumerate(truth)]})
    core, _ = make_core(poison=61, speculator=Speculator(oracle, 4, clock=Ticks()))
    core.add_request("a", prompt, GREEDY)
    assert outputs(drain(core))[("a", 0)] == truth


def test_numbers_that_break_down_behind_accepted_tokens() -> None:
    prompt = prompt_of(0, 9)
    truth = solo(prompt, GREEDY)
    core, _ = make_core(
        poison=truth[3], speculator=Speculator(Oracle({"a": truth}), 4, clock=Ticks())
    )
    core.add_request("a", prompt, GREEDY)
    events = drain(core)
    assert _joined(events, "token_ids") == truth[:4]
    assert events[-1].finish_reason == "error"
    assert "model.layers.1" in (events[-1].error or "")


def test_aborted_with_a_draft() -> None:
    """E17: blocks that were taken for a draft are freed, and the drafter forgets the request."""
    prompts = {"a": prompt_of(0, 9), "b": prompt_of(1, 9)}
    core, _, oracle = speculating(prompts, {"a": GREEDY, "b": GREEDY}, max_batch_tokens=64)
    events = [event for _ in range(4) for event in core.step()]
    core.abort("a")
    assert oracle.known == {"b"}
    core.check_integrity()
    events += drain(core)
    assert outputs(events)[("b", 0)] == solo(prompts["b"], GREEDY)
    assert not oracle.known


class Repeater(FakeRunner):
    """Logits that depend on the last token only, so that texts soon repeat themselves."""

    def logits(self, history: Sequence[int]) -> torch.Tensor:
        return super().logits(list(history[-1:]))


class Remembering(FakeRunner):
    """Computes the logits of a history once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, history: Sequence[int]) -> torch.Tensor:
        key = tuple(history)
        if key not in self._known:
            self._known[key] = super().logits(history)
        return self._known[key]


def test_prompt_lookup_finds_repetitions() -> None:
    prompt = prompt_of(0, 9)
    texts, steps = [], []
    for speculator in (None, Speculator(NgramDrafter(), 4, clock=Ticks())):
        core, runner = make_core(
            runner_class=Repeater, speculator=speculator, max_model_len=512, num_blocks=128
        )
        params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        core.add_request("a", prompt, params)
        texts.append(outputs(drain(core))[("a", 0)])
        steps.append(len(runner.num_tokens))
    assert texts[0] == texts[1]
    assert steps[1] < steps[0] / 2


@pytest.mark.parametrize("wrong", [0.0, 0.5])
def test_the_distribution_is_that_of_plain_sampling(wrong: float) -> None:
    """Chi-square over two tokens of a tiny vocabulary, many seeds, drafts from a biased drafter.

    The drafter always proposes the same tokens, as a drafter with a distribution of its own
    would; the pairs that come out must be distributed as the model says.
    """
    size, runs = 4, 2000
    fixed = {str(i): [0, 1, 2] if i % 4 < 4 * wrong else [2, 2, 2] for i in range(runs)}
    speculator = Speculator(Oracle(fixed), 2, clock=Ticks())
    core, runner = make_core(
        num_blocks=8192,
        max_batch_tokens=runs * 4,
        max_running=runs // 8,
        vocab_size=size,
        runner_class=Remembering,
        speculator=speculator,
        enable_prefix_caching=False,
    )
    for i in range(runs):
        params = SamplingParams(temperature=1.3, seed=i, max_tokens=3, ignore_eos=True)
        core.add_request(str(i), [1, 2], params)
    counts = torch.zeros(size, size, dtype=torch.float64)
    for tokens in outputs(drain(core)).values():
        counts[tokens[0], tokens[1]] += 1
    stats = core.stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    first = torch.softmax(runner.logits([1, 2]).double() / 1.3, -1)
    then = torch.stack([runner.logits([1, 2, t]).double() for t in range(size)]) / 1.3
    expected = runs * first[:, None] * torch.softmax(then, -1)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < 37.7  # 99.9 % quantile of chi-square with 15 degrees of freedom


def test_drafting_that_does_not_pay_is_left_out() -> None:
    """Steps that take as long as they have tokens: a wrong drafter is asked only to probe."""

    class PerToken:
        """A clock that a runner's tokens advance."""

        now = 0.0
        runner: FakeRunner | None = None
        seen = 0

        def __call__(self) -> float:
            if self.runner is not None:
                self.now += sum(self.runner.num_tokens[self.seen :])
                self.seen = len(self.runner.num_tokens)
            return self.now

    prompt, params = (
        prompt_of(0, 5),
        SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True),
    )
    oracle = Oracle({"a": solo(prompt, params)}, wrong=1.0)
    clock = PerToken()
    core, runner = make_core(speculator=Speculator(oracle, 4, clock=clock))
    clock.runner = runner
    core.add_request("a", prompt, params)
    assert outputs(drain(core))[("a", 0)] == oracle.truth["a"]
    stats = core.stats()
    assert stats.accepted_draft_tokens == 0
    assert 0 < stats.draft_tokens < 20
