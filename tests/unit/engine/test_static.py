"""Static batching: nobody joins, and a finished slot costs what a running one costs."""

import pytest
from support.fake_engine import drain, make_core, outputs

from qinfer.engine.blocks import BlockManager
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import Request
from qinfer.engine.scheduler import Batch, Scheduler
from qinfer.engine.static import StaticScheduler
from qinfer.errors import CapacityError, ConfigError, RequestError


def make(name: str, num_prompt: int, num_output: int) -> Request:
    return Request(
        id=name,
        tokens=[1] * num_prompt,
        num_prompt=num_prompt,
        params=SamplingParams(),
        max_length=num_prompt + num_output,
    )


def make_scheduler(num_blocks: int = 32, max_running: int = 3, max_batch_tokens: int = 16):
    blocks = BlockManager(num_blocks, 4, enable_prefix_caching=False)
    return StaticScheduler(blocks, max_batch_tokens=max_batch_tokens, max_running=max_running)


def finish_step(scheduler: Scheduler, batch: Batch) -> tuple[dict[str, int], int]:
    """Give tokens, end what is complete; returns the work and the number of finished slots."""
    new = {r.id: (2,) for r, n in batch.items if r.wanted_rows(n)}
    scheduler.update(batch, new)
    for request, _ in batch.items:
        if request.num_tokens >= request.max_length:
            scheduler.finish(request, "length")
    scheduler.check_integrity()
    return {request.id: num for request, num in batch.items}, len(batch.padding)


def test_a_finished_slot_is_computed_until_the_longest_of_its_batch_is_done() -> None:
    scheduler = make_scheduler()
    for name, num_output in (("a", 2), ("b", 5), ("c", 3), ("next", 1)):
        scheduler.add(make(name, 4, num_output))
    steps = []
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        for slot, num in batch.padding:
            assert num == 1
            assert len(slot.wanted_rows(num)) == 1  # a row of logits too
        steps.append(finish_step(scheduler, batch))
    assert steps == [
        ({"a": 4, "b": 4, "c": 4}, 0),
        ({"a": 1, "b": 1, "c": 1}, 0),
        ({"b": 1, "c": 1}, 1),
        ({"b": 1}, 2),
        ({"b": 1}, 2),
        ({"next": 4}, 0),
    ]
    assert scheduler.counters.padding_tokens == 5
    assert scheduler.counters.computed_tokens == 16 + (1 + 4 + 2) + 5
    assert scheduler.blocks.num_used == 0


def test_a_batch_is_formed_so_that_nobody_is_ever_preempted() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(make("a", 4, 13))  # 4 blocks in the end
    scheduler.add(make("b", 4, 10))
    scheduler.add(make("c", 4, 1))
    batch = scheduler.schedule()
    assert [request.id for request, _ in batch.items] == ["a", "b"]
    finish_step(scheduler, batch)
    while scheduler.has_unfinished:
        finish_step(scheduler, scheduler.schedule())
    assert scheduler.counters.preemptions == 0


def test_an_aborted_slot_is_free_at_once() -> None:
    scheduler = make_scheduler()
    first, second = make("a", 4, 5), make("b", 4, 5)
    scheduler.add(first)
    scheduler.add(second)
    finish_step(scheduler, scheduler.schedule())
    scheduler.finish(first, "abort")
    assert finish_step(scheduler, scheduler.schedule()) == ({"b": 1}, 0)
    scheduler.finish(second, "abort")
    assert scheduler.blocks.num_used == 0


def test_what_does_not_go_together_with_static_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefix caching"):
        StaticScheduler(BlockManager(8, 4), max_batch_tokens=8, max_running=2)
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match="batching=continuous") as refusal:
        scheduler.check_capacity(4, num_sequences=2)
    assert refusal.value.field == "beam_width"
    request = make("a", 4, 5)
    scheduler.add(request)
    finish_step(scheduler, scheduler.schedule())
    with pytest.raises(CapacityError, match="batching=continuous"):
        scheduler.fork(request, make("b", 4, 5))
    scheduler.finish(request, "abort")


def test_texts_are_those_of_continuous_batching() -> None:
    results = []
    for batching in ("continuous", "static"):
        core, runner = make_core(batching=batching, enable_prefix_caching=False)
        for index in range(6):
            params = SamplingParams(temperature=0.0, max_tokens=3 + 5 * index, ignore_eos=True)
            core.add_request(str(index), [index, 5, 9], params)
        results.append(outputs(drain(core)))
        if batching == "static":
            rows = sum(len(inputs.logit_rows) for inputs in runner.inputs)
            # Two batches, of which each of 4 and 2 slots takes as long as its longest text.
            assert rows == 4 * 18 + 2 * 28
    assert results[0] == results[1]
