from collections.abc import Iterator

import pytest

from qinfer.engine.blocks import BlockManager
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import Request, RequestStatus
from qinfer.engine.scheduler import Batch, Scheduler
from qinfer.errors import CapacityError, OverloadedError, RequestError


def make(
    name: str, num_prompt: int, num_output: int = 4, *, token: int = 1, priority: int = 0
) -> Request:
    return Request(
        id=name,
        tokens=[token] * num_prompt,
        num_prompt=num_prompt,
        params=SamplingParams(priority=priority),
        max_length=num_prompt + num_output,
    )


def make_samples(name: str, num_prompt: int, num_output: int, count: int) -> list[Request]:
    samples = [make(f"{name}#{index}", num_prompt, num_output) for index in range(count)]
    for sample in samples:
        sample.parent = name
    return samples


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


def test_beside_streams_a_prompt_takes_small_steps() -> None:
    scheduler = make_scheduler(num_blocks=64, max_mixed_tokens=3)
    scheduler.add(make("first", 10, 4))
    steps = run(scheduler)
    assert next(steps) == {"first": 10}  # alone, it has the whole budget
    scheduler.add(make("second", 20, 2, token=5))
    assert [next(steps) for _ in range(3)] == [{"first": 1, "second": 3}] * 3
    assert next(steps) == {"second": 11}  # the stream has ended


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


def test_samples_of_one_prompt_compute_it_once() -> None:
    """Without prefix cache too: the last, partial block is copied, the others are shared."""
    blocks = BlockManager(num_blocks=32, block_size=4, enable_prefix_caching=False)
    scheduler = Scheduler(blocks, max_batch_tokens=16, max_running=4)
    samples = make_samples("p", 22, 3, 4)
    for sample in samples:
        scheduler.add(sample)
    assert finish_step(scheduler, scheduler.schedule()) == {"p#0": 16}
    assert finish_step(scheduler, scheduler.schedule()) == {"p#0": 6}
    batch = scheduler.schedule()
    assert {request.id: num for request, num in batch.items} == {f"p#{i}": 1 for i in range(4)}
    first, *others = samples
    assert batch.copies == tuple((first.block_ids[5], other.block_ids[5]) for other in others)
    assert all(other.block_ids[:5] == first.block_ids[:5] for other in others)
    finish_step(scheduler, batch)
    list(run(scheduler))
    # The prompt once; the others compute its last token for a draw of their own; 2 outputs each.
    assert scheduler.counters.computed_tokens == 22 + 3 + 4 * 2
    assert scheduler.counters.shared_tokens == 3 * 21
    assert scheduler.counters.prefix_hit_tokens == 0


def test_those_behind_samples_do_not_wait_for_their_prompt() -> None:
    scheduler = make_scheduler(num_blocks=32, max_batch_tokens=8)
    for sample in make_samples("p", 14, 2, 2):
        scheduler.add(sample)
    scheduler.add(make("behind", 4, 2, token=7))
    assert finish_step(scheduler, scheduler.schedule()) == {"p#0": 8}
    assert finish_step(scheduler, scheduler.schedule()) == {"p#0": 6, "behind": 2}
    assert finish_step(scheduler, scheduler.schedule()) == {"p#0": 1, "p#1": 1, "behind": 2}


def test_a_sample_goes_on_alone_when_its_siblings_are_gone() -> None:
    scheduler = make_scheduler(num_blocks=32, max_batch_tokens=8, max_running=1)
    first, second = make_samples("p", 10, 3, 2)
    scheduler.add(first)
    scheduler.add(second)
    finish_step(scheduler, scheduler.schedule())
    scheduler.finish(first, "abort")  # its first 8 tokens stay in the prefix cache
    assert next(iter(run(scheduler))) == {"p#1": 2}


def test_lower_priority_numbers_run_first_and_equal_ones_in_order() -> None:
    scheduler = make_scheduler(num_blocks=64, max_running=1)
    for name, priority in (("late", 1), ("a", 0), ("b", 0), ("first", -1)):
        scheduler.add(make(name, 2, 2, priority=priority))
    order = [name for step in run(scheduler) for name in step]
    assert list(dict.fromkeys(order)) == ["first", "a", "b", "late"]


def test_the_lowest_priority_and_latest_arrival_is_preempted_first() -> None:
    scheduler = make_scheduler(num_blocks=9, max_batch_tokens=32)
    requests = [
        make("low", 6, 14, priority=1),
        make("low-later", 6, 14, token=9, priority=1),
        make("high", 6, 14, token=8),
    ]
    for request in requests:
        scheduler.add(request)
    victims: list[str] = []
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        victims += [request.id for request in batch.preempted]
        finish_step(scheduler, batch)
    assert victims[0] == "low-later"
    assert "high" not in victims


def test_a_better_class_takes_slots_and_blocks_from_a_worse_one_only() -> None:
    scheduler = make_scheduler(num_blocks=8, max_running=2)
    low, equal = make("low", 10, 10, priority=5), make("equal", 10, 10, token=9)
    scheduler.add(low)
    scheduler.add(equal)
    finish_step(scheduler, scheduler.schedule())
    finish_step(scheduler, scheduler.schedule())
    scheduler.add(make("urgent", 9, 2, token=8))
    batch = scheduler.schedule()
    assert batch.preempted == (low,)
    assert "urgent" in {request.id for request, _ in batch.items}
    assert equal.num_preemptions == 0
    finish_step(scheduler, batch)
    list(run(scheduler))


def test_nobody_is_preempted_for_one_who_would_wait_nevertheless() -> None:
    scheduler = make_scheduler(num_blocks=8, max_batch_tokens=32)
    scheduler.add(make("low", 3, 10, priority=5))
    scheduler.add(make("peer", 22, 4, token=9))
    finish_step(scheduler, scheduler.schedule())
    scheduler.add(make("urgent", 9, 2, token=8))
    assert scheduler.schedule().preempted == ()


def test_requests_beyond_the_queue_are_refused_until_there_is_room() -> None:
    """S04: a bounded queue; what is preempted comes back in any case."""
    scheduler = make_scheduler(max_running=1, max_queue=2)
    for name in "abc":
        scheduler.check_queue()
        scheduler.add(make(name, 2, 2))
    with pytest.raises(OverloadedError, match=r"1 requests can run and 2 may wait .* try again"):
        scheduler.check_queue()
    steps = run(scheduler)
    while scheduler.num_waiting + scheduler.num_running == 3:
        next(steps)
    scheduler.check_queue()


def test_sequences_that_must_run_together_must_fit_together() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.check_capacity(16, num_sequences=2)
    with pytest.raises(CapacityError, match="3 times 12 cached tokens, but the cache holds 32"):
        scheduler.check_capacity(12, num_sequences=3)


def decode(scheduler: Scheduler, request: Request) -> None:
    """Run a request until it has its first token."""
    scheduler.add(request)
    while request.num_output == 0:
        finish_step(scheduler, scheduler.schedule())


def test_a_draft_is_computed_and_kept_as_far_as_it_is_right() -> None:
    scheduler = make_scheduler()
    request = make("a", 6, 10)
    decode(scheduler, request)
    request.draft = [4, 5, 6]
    batch = scheduler.schedule()
    assert batch.items == ((request, 4),)
    assert request.upcoming(4) == [2, 4, 5, 6]
    assert request.wanted_rows(4) == range(6, 10)
    scheduler.update(batch, {"a": (4, 5, 9)})
    assert request.tokens[6:] == [2, 4, 5, 9]
    assert request.num_computed == 9
    assert request.draft == []
    counters = scheduler.counters
    assert (counters.draft_tokens, counters.accepted_draft_tokens) == (3, 2)
    list(run(scheduler))


def test_a_rejected_draft_gives_its_blocks_back() -> None:
    scheduler = make_scheduler()
    request = make("a", 6, 20)
    decode(scheduler, request)
    request.draft = [4] * 7
    batch = scheduler.schedule()
    assert len(request.block_ids) == 4
    scheduler.update(batch, {"a": (9,)})
    assert (request.num_computed, len(request.block_ids)) == (7, 2)
    list(run(scheduler))


def test_drafts_get_what_the_tokens_of_others_leave() -> None:
    scheduler = make_scheduler(num_blocks=9, max_batch_tokens=6, max_logit_rows=5)
    requests = [make(name, 3, 9, token=ord(name)) for name in "ab"]
    for request in requests:
        decode(scheduler, request)
    for request in requests:
        request.draft = [7] * 6
    # Six tokens and five rows: one of each for b, the rest for a, whose draft comes first.
    assert [num for _, num in scheduler.schedule().items] == [4, 1]
    assert [len(request.draft) for request in requests] == [3, 0]


def test_drafts_never_take_blocks_that_others_need_nor_go_beyond_the_end() -> None:
    scheduler = make_scheduler(num_blocks=5, max_batch_tokens=64)
    a, b = make("a", 3, 12), make("b", 11, 5, token=9)
    decode(scheduler, a)
    decode(scheduler, b)
    a.draft = [7] * 3  # fits into the last idle block, which b needs
    batch = scheduler.schedule()
    assert batch.preempted == ()
    assert a.draft == []
    scheduler.finish(b, "abort")
    finish_step(scheduler, batch)
    a.draft = [7] * 40
    batch = scheduler.schedule()
    assert batch.items[0][1] == a.max_slots - a.num_computed
    finish_step(scheduler, batch)
    list(run(scheduler))


def test_a_preempted_request_has_no_draft() -> None:
    scheduler = make_scheduler(num_blocks=5, max_batch_tokens=64)
    a, b = make("a", 7, 8), make("b", 7, 8, token=9)
    decode(scheduler, a)
    decode(scheduler, b)
    finish_step(scheduler, scheduler.schedule())
    b.draft = [7]
    batch = scheduler.schedule()
    assert batch.preempted == (b,)
    assert b.draft == []
    finish_step(scheduler, batch)
    list(run(scheduler))


def test_a_fork_shares_blocks_until_it_writes() -> None:
    scheduler = make_scheduler(max_running=1)
    parent = make("parent", 6, 8)
    decode(scheduler, parent)
    child = make("child", 6, 8)
    child.tokens.append(3)
    scheduler.fork(parent, child)
    assert child.block_ids == parent.block_ids
    assert child.num_computed == 6
    assert scheduler.blocks.num_used == 2
    batch = scheduler.schedule()
    assert [num for _, num in batch.items] == [1, 1]  # beside the limit of one
    assert batch.copies == ((child.block_ids[1], parent.block_ids[1]),)  # who writes first copies
    assert child.block_ids[0] == parent.block_ids[0]
    finish_step(scheduler, batch)
    scheduler.finish(parent, "stop")
    assert child.rank > parent.rank
    list(run(scheduler))


def test_only_running_requests_can_be_forked() -> None:
    scheduler = make_scheduler()
    parent = make("parent", 6)
    scheduler.add(parent)
    with pytest.raises(CapacityError, match="'parent' holds no blocks"):
        scheduler.fork(parent, make("child", 6))
    with pytest.raises(RequestError, match="already in use"):
        scheduler.fork(parent, make("parent", 6))
