"""A fake model as drafter: it follows what the target accepts, within its own cache."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.fake_engine import (
    BLOCK_SIZE,
    EOS,
    VOCAB,
    ByteTokenizer,
    FakeRunner,
    Ticks,
    drain,
    make_core,
    prompt_of,
)
from support.fake_engine import outputs as outputs_of

from qinfer.engine.blocks import BlockManager
from qinfer.engine.core import EngineCore
from qinfer.engine.draft_model import ModelDrafter
from qinfer.engine.params import SamplingParams
from qinfer.engine.sampler import Sampler
from qinfer.engine.speculation import Speculator

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=20, ignore_eos=True)


class Rough(FakeRunner):
    """A model that agrees with the target most of the time."""

    def logits(self, history: Sequence[int]) -> torch.Tensor:
        exact = super().logits(history)
        noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(sum(history)))
        return exact + 0.5 * noise


def make_drafter(
    runner_class: type[FakeRunner] = Rough,
    *,
    num_blocks: int = 64,
    max_batch_tokens: int = 16,
    max_positions: int = 128,
    poison: int | None = None,
) -> tuple[ModelDrafter, FakeRunner]:
    runner = runner_class(num_blocks * BLOCK_SIZE, poison=poison)
    drafter = ModelDrafter(
        runner,
        BlockManager(num_blocks, BLOCK_SIZE),
        Sampler(ByteTokenizer(), vocab_size=VOCAB, eos_ids={EOS}),
        max_batch_tokens=max_batch_tokens,
        max_positions=max_positions,
    )
    return drafter, runner


def drafted(
    drafter: ModelDrafter, requests: dict[str, tuple[list[int], SamplingParams]], **options: Any
) -> tuple[EngineCore, dict[tuple[str, int], list[int]]]:
    """Run requests with drafts; the drafter's books must be right after every step."""
    core, _ = make_core(speculator=Speculator(drafter, 4, clock=Ticks()), **options)
    for name, (prompt, params) in requests.items():
        core.add_request(name, prompt, params)
    events = []
    while core.has_unfinished:
        events += core.step()
        core.check_integrity()
        drafter.check_integrity()
    assert not drafter._sequences
    assert drafter._blocks.num_used == 0
    return core, outputs_of(events)


def plain(prompt: list[int], params: SamplingParams) -> list[int]:
    core, _ = make_core(max_batch_tokens=1000)
    core.add_request("solo", prompt, params)
    return outputs_of(drain(core))[("solo", 0)]


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_model_that_equals_the_target_is_always_right(params: SamplingParams) -> None:
    """Drawn tokens too: both models are asked with the same random number."""
    prompt = prompt_of(0, 21)
    drafter, runner = make_drafter(FakeRunner)
    core, result = drafted(drafter, {"a": (prompt, params)})
    assert result[("a", 0)] == plain(prompt, params)
    stats = core.stats()
    assert stats.draft_tokens == stats.accepted_draft_tokens > 10
    assert sum(runner.num_tokens) <= 21 + 20 - 2  # nothing is computed twice
    assert max(runner.num_tokens) <= 16


@pytest.mark.parametrize("max_batch_tokens", [5, 9, 16])
def test_a_rough_model_changes_nothing(max_batch_tokens: int) -> None:
    """E02, E04: greedy, drawn and penalized requests in one batch."""
    penalized = SamplingParams(
        temperature=0.0,
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        max_tokens=20,
        ignore_eos=True,
    )
    requests = {
        str(i): (prompt_of(9, 6) + prompt_of(i, 3 + 4 * i), (GREEDY, DRAWN, penalized)[i % 3])
        for i in range(6)
    }
    drafter, _ = make_drafter(max_batch_tokens=max_batch_tokens)
    core, result = drafted(drafter, requests)
    for name, (prompt, params) in requests.items():
        assert result[(name, 0)] == plain(prompt, params)
    stats = core.stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens


def test_preempted_requests_and_a_small_cache_of_the_drafter() -> None:
    """E16: drafts are left out where a cache has no room, never a token."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    requests = {str(i): (prompt_of(i, 16), params) for i in range(3)}
    for own, target in ((6, 64), (14, 12), (64, 12)):
        drafter, _ = make_drafter(num_blocks=own)
        core, result = drafted(drafter, requests, num_blocks=target)
        for name, (prompt, _) in requests.items():
            assert result[(name, 0)] == plain(prompt, params)
        assert (core.stats().preemptions > 0) == (target == 12)


def test_samples_share_the_prompt_in_the_drafters_cache() -> None:
    prompt = prompt_of(0, 33)
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=20, ignore_eos=True)
    drafter, runner = make_drafter(FakeRunner, max_batch_tokens=64)
    drafted(drafter, {"a": (prompt, params)}, max_batch_tokens=64)
    drafter, again = make_drafter(FakeRunner, max_batch_tokens=64)
    single = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    drafted(drafter, {"a": (prompt, single), "b": (prompt_of(1, 33), single)}, max_batch_tokens=64)
    assert sum(runner.num_tokens) < 3 * 33 + 3 * 20 - 2 * 32
    assert sum(again.num_tokens) >= 2 * 33


def test_sequences_beyond_the_drafters_positions_are_left_alone() -> None:
    prompt = prompt_of(0, 21)
    drafter, runner = make_drafter(max_positions=40)
    core, result = drafted(drafter, {"long": (prompt, GREEDY), "short": (prompt[:5], GREEDY)})
    assert result[("long", 0)] == plain(prompt, GREEDY)
    assert core.stats().draft_tokens > 0
    assert sum(runner.num_tokens) < 60


def test_a_long_prompt_is_not_followed_for_a_short_answer() -> None:
    short = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    drafter, runner = make_drafter()
    core, result = drafted(drafter, {"a": (prompt_of(0, 60), short)})
    assert result[("a", 0)] == plain(prompt_of(0, 60), short)
    assert core.stats().draft_tokens == sum(runner.num_tokens) == 0


def test_rows_that_break_down_end_a_draft_and_nothing_else() -> None:
    """G06: what the draft model does wrong is its own affair."""
    prompt = prompt_of(0, 9)
    truth = plain(prompt, GREEDY)
    drafter, _ = make_drafter(FakeRunner, poison=truth[3])
    core, result = drafted(drafter, {"a": (prompt, GREEDY)})
    assert result[("a", 0)] == truth
    assert core.stats().finished == {"length": 1}
