from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qinfer.engine.blocks import BlockManager
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import Request, RequestStatus
from qinfer.engine.scheduler import Batch, Scheduler
from qinfer.errors import CapacityError, RequestError


def make(name: str, num_prompt: int, num_output: int = 4, *, token: int = 1) -> Request:
    return Request(
        id=name,
        tokens=[token] * num_prompt,
        num_prompt=num_prompt,
        params=SamplingParams(),
        max_length=num_prompt + num_output,
    )


def make_scheduler(num_blocks: int = 8, max_batch_tokens: int = 16, max_running: int = 4, **more):
    blocks = BlockManager(num_blocks=num_blocks, block_size=4)
    return Scheduler(blocks, max_batch_tokens=max_batch_tokens, max_running=max_running, **more)


def finish_step(scheduler: Scheduler, batch: Batch, token: int = 2) -> dict[str, int]:
    """Give a token to every request that is caught up, and end those that are complete."""
    new = {r.id: (token,) for r, n in batch.items if r.wanted_rows(n) and r.score_next is None}
    scheduler.update(batch, new)
    for request, _ in batch.items:
        over = request.num_tokens >= request.max_length
        if request.num_computed == request.num_tokens if request.score_next is not None else over:
            scheduler.finish(request, "length")
    return {request.id: num for request, num in batch.items}


def run(scheduler: Scheduler, max_steps: int = 1000) -> Iterator[dict[str, int]]:
    for _ in range(max_steps):
        if not scheduler.has_unfinished:
            return
        batch = scheduler.schedule()
        yield finish_step(scheduler, batch)
        scheduler.check_integrity()
    raise AssertionError("did not finish")


def test_long_prompts_are_cut_to_the_budget_and_decoding_comes_first() -> None:
    scheduler = make_scheduler(num_blocks=32)
    scheduler.add(make("long", 30, 3))
    scheduler.add(make("short", 3, 5, token=5))
    steps = list(run(scheduler))
    assert steps[0] == {"long": 16}
    assert steps[1] == {"long": 14, "short": 2}
    assert steps[2] == {"long": 1, "short": 1}  # short's third token
    assert all(sum(step.values()) <= 16 for step in steps)


def test_a_decoding_request_is_not_held_up_by_a_long_prompt() -> None:
    scheduler = make_scheduler(num_blocks=32, max_batch_tokens=4)
    scheduler.add(make("stream", 2, 10))
    first = scheduler.schedule()
    finish_step(scheduler, first)
    scheduler.add(make("long", 40, 1, token=3))
    for _ in range(5):
        step = finish_step(scheduler, scheduler.schedule())
        assert step == {"stream": 1, "long": 3}


def test_max_running_and_arrival_order() -> None:
    scheduler = make_scheduler(num_blocks=64, max_running=2)
    for name in "abcd":
        scheduler.add(make(name, 2, 2))
    order = []
    for step in run(scheduler):
        assert len(step) <= 2
        order += [name for name in step if name not in order]
    assert order == ["a", "b", "c", "d"]


def test_the_latest_arrival_is_preempted_and_resumes_in_order() -> None:
    scheduler = make_scheduler(num_blocks=5)
    a, b = make("a", 6, 10), make("b", 6, 10, token=9)
    scheduler.add(a)
    scheduler.add(b)
    list(run(scheduler))
    assert scheduler.counters.preemptions > 0
    assert a.num_preemptions == 0
    assert b.num_preemptions == scheduler.counters.preemptions
    assert a.num_tokens == b.num_tokens == 16


def test_recomputed_tokens_are_no_prefix_hits() -> None:
    """E16: counters stay honest when a request is preempted and finds its own blocks again."""
    scheduler = make_scheduler(num_blocks=5)
    scheduler.add(make("a", 6, 10))
    scheduler.add(make("b", 6, 10, token=9))
    list(run(scheduler))
    assert scheduler.counters.prefix_hit_tokens == 0
    assert scheduler.counters.prefix_query_tokens == 12
    assert scheduler.counters.computed_tokens >= 2 * 15


def test_larger_than_the_pool_is_refused_not_looped() -> None:
    """E16: a single request that can never fit ends at the door."""
    scheduler = make_scheduler(num_blocks=12)
    scheduler.add(make("fits", 36, 13))  # 48 slots: the last token is never read
    with pytest.raises(CapacityError, match="60 cached tokens, but the cache holds 48"):
        scheduler.add(make("60", 36, 25))


def test_an_id_in_use_is_refused_and_free_again_later() -> None:
    """E18: a duplicate id must not overwrite the first request."""
    scheduler = make_scheduler()
    scheduler.add(make("x", 2))
    with pytest.raises(RequestError, match="'x' is already in use"):
        scheduler.add(make("x", 2))
    list(run(scheduler))
    scheduler.add(make("x", 2))


def test_waiting_requests_are_dropped_before_they_cost_anything() -> None:
    """E17: cancelled while waiting, a request is never computed."""
    scheduler = make_scheduler(max_running=1)
    a, b = make("a", 4, 6), make("b", 9, 6, token=3)
    scheduler.add(a)
    scheduler.add(b)
    finish_step(scheduler, scheduler.schedule())
    scheduler.finish(b, "abort")
    assert scheduler.num_waiting == 0
    for step in run(scheduler):
        assert "b" not in step
    assert scheduler.counters.computed_tokens == 9


def test_a_running_request_is_freed_at_once_when_it_ends() -> None:
    scheduler = make_scheduler()
    request = make("a", 10)
    scheduler.add(request)
    finish_step(scheduler, scheduler.schedule())
    assert scheduler.blocks.num_used == 3
    scheduler.finish(request, "abort")
    assert request.status is RequestStatus.FINISHED
    assert scheduler.blocks.num_used == 0
    assert not scheduler.has_unfinished


def test_scored_rows_have_a_budget_of_their_own() -> None:
    scheduler = make_scheduler(num_blocks=64, max_batch_tokens=16, max_logit_rows=5)
    scored = make("s", 20, 0)
    scored.score_next, scored.max_length = 8, 20
    scheduler.add(scored)
    scheduler.add(make("g", 3, 2, token=4))
    steps = list(run(scheduler))
    assert steps[0] == {"s": 13, "g": 2}  # 8 without rows, 5 with; the last of g must wait
    assert sum(step.get("s", 0) for step in steps) == 20


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts and steps on a small pool with shared prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(
            BlockManager(num_blocks=8, block_size=4), max_batch_tokens=7, max_running=3
        )
        self.count = 0
        self.open: dict[str, Request] = {}
        self.cached: dict[int, tuple[int, ...]] = {}  # slot -> the tokens up to it

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        num_output=st.integers(1, 12),
        use_prefix_cache=st.booleans(),
    )
    def add(self, tokens: list[int], num_output: int, use_prefix_cache: bool) -> None:
        self.count += 1
        request = Request(
            id=str(self.count),
            tokens=tokens,
            num_prompt=len(tokens),
            params=SamplingParams(),
            max_length=len(tokens) + num_output,
            use_prefix_cache=use_prefix_cache,
        )
        self.scheduler.add(request)
        self.open[request.id] = request

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.scheduler.finish(self.open.pop(name), "abort")

    @rule()
    def step(self) -> None:
        batch = self.scheduler.schedule()
        assert sum(num for _, num in batch.items) <= 7
        assert self.scheduler.num_running <= 3
        scheduled = [request for request, _ in batch.items]
        assert not set(map(id, scheduled)) & set(map(id, batch.preempted))
        assert bool(batch.items) == bool(self.open)
        written: set[int] = set()
        for request, num_new in batch.items:
            assert num_new >= 1
            assert len(request.wanted_rows(num_new)) <= 1
            self._write(request, num_new, written)
        new = {r.id: (self.count % 2,) for r, n in batch.items if r.wanted_rows(n)}
        self.scheduler.update(batch, new)
        for request in scheduled:
            if request.num_tokens >= request.max_length:
                self.scheduler.finish(request, "length")
                del self.open[request.id]

    def _write(self, request: Request, num_new: int, written: set[int]) -> None:
        """Write a chunk; what the request finds before it must be what it would have written."""
        blocks = self.scheduler.blocks
        end = request.num_computed + num_new
        for position in range(end):
            block = request.block_ids[position // 4]
            slot = block * 4 + position % 4
            history = tuple(request.tokens[: position + 1])
            if position < request.num_computed:
                assert self.cached[slot] == history
                continue
            assert slot not in written
            assert blocks._refs[block] == 1, "a shared block is written"
            assert blocks._hash_of[block] is None, "a cached block is written"
            written.add(slot)
            self.cached[slot] = history

    @invariant()
    def books_are_right(self) -> None:
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        for _ in range(500):
            if not self.open:
                break
            self.step()
            self.scheduler.check_integrity()
        assert not self.open, "a request starves"
        assert self.scheduler.blocks.num_used == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
