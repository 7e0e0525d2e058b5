import asyncio
import threading
from contextlib import aclosing

import pytest
from support.fake_engine import FakeRunner, drain, make_core, outputs

from qinfer.engine.aio import AsyncEngine
from qinfer.engine.core import EngineCore
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import TokenEvent
from qinfer.errors import (
    CapacityError,
    ContextLengthError,
    OverloadedError,
    QinferError,
    RequestError,
)
from qinfer.kvcache.inputs import ModelInputs, ModelOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


async def collect(engine: AsyncEngine, prompt: list[int], params: SamplingParams, name: str):
    async with aclosing(engine.generate(prompt, params, name)) as stream:
        return [event async for event in stream]


async def settle(engine: AsyncEngine) -> None:
    """Wait until the engine has nothing left to do."""
    for _ in range(2000):
        stats = engine.stats()
        if stats.running == stats.waiting == 0:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the engine does not come to rest")


def solo(prompt: list[int], params: SamplingParams) -> list[int]:
    core, _ = make_core()
    core.add_request("solo", prompt, params)
    return outputs(drain(core))[("solo", 0)]


def tokens_of(events: list[TokenEvent], index: int = 0) -> list[int]:
    return [token for event in events if event.index == index for token in event.token_ids]


class Gate(FakeRunner):
    """A runner that waits before every step, so that a test decides when it happens."""

    def __init__(self, runner: FakeRunner) -> None:
        super().__init__(len(runner.cache))
        self.may_run = threading.Semaphore(0)

    def run(self, inputs: ModelInputs) -> ModelOutput:
        assert self.may_run.acquire(timeout=30)
        return super().run(inputs)


def gated(**options) -> tuple[EngineCore, Gate]:
    core, runner = make_core(**options)
    core._runner = gate = Gate(runner)
    return core, gate


def test_streams_run_side_by_side_and_equal_solo_runs() -> None:
    async def main() -> None:
        core, _ = make_core()
        engine = AsyncEngine(core)
        await engine.start()
        assert engine.healthy
        prompts = [[i, i + 1, 7] for i in range(8)]
        results = await asyncio.gather(
            *(collect(engine, p, GREEDY, str(i)) for i, p in enumerate(prompts))
        )
        for prompt, events in zip(prompts, results, strict=True):
            assert tokens_of(events) == solo(prompt, GREEDY)
            assert [e.finish_reason for e in events] == [None] * 7 + ["length"]
        await engine.stop()
        assert not engine.healthy
        core.check_integrity()

    asyncio.run(main())


def test_samples_of_one_prompt_are_told_apart_by_their_index() -> None:
    async def main() -> None:
        core, _ = make_core()
        engine = AsyncEngine(core)
        await engine.start()
        params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=6, ignore_eos=True)
        events = await collect(engine, [1, 2], params, "x")
        assert {event.request_id for event in events} == {"x"}
        assert len({tuple(tokens_of(events, index)) for index in range(3)}) == 3
        assert sum(event.finish_reason is not None for event in events) == 3
        await engine.stop()

    asyncio.run(main())


def test_closing_a_stream_aborts_its_request_and_no_other() -> None:
    """E17, S01: a client that goes away costs nothing more; its id is free at once."""

    async def main() -> None:
        core, _ = make_core()
        engine = AsyncEngine(core)
        await engine.start()
        other = asyncio.create_task(collect(engine, [9, 9], LONG, "other"))
        stream = engine.generate([1, 2], LONG, "x")
        await anext(stream)
        await stream.aclose()
        again = await collect(engine, [3, 4], GREEDY, "x")
        assert tokens_of(again) == solo([3, 4], GREEDY)
        assert tokens_of(await other) == solo([9, 9], LONG)
        await settle(engine)
        assert engine.stats().finished == {"abort": 1, "length": 2}
        assert engine.stats().free_blocks == engine.stats().num_blocks
        await engine.stop()

    asyncio.run(main())


def test_late_events_of_an_aborted_request_do_not_reach_its_successor() -> None:
    """E18: results must not be mixed when a client uses an id again."""

    async def main() -> None:
        core, gate = gated()
        engine = AsyncEngine(core)
        await engine.start()
        stream = engine.generate([1, 2], LONG, "x")
        gate.may_run.release()
        await anext(stream)  # the next step of the old request is on its way
        await stream.aclose()
        again = asyncio.create_task(collect(engine, [3, 4], GREEDY, "x"))
        await asyncio.sleep(0)
        gate.may_run.release(100)
        assert tokens_of(await again) == solo([3, 4], GREEDY)
        await engine.stop()

    asyncio.run(main())


def test_a_request_cancelled_while_waiting_is_never_computed() -> None:
    """E17: batch limit 1; prefill must not include the one that left."""

    async def main() -> None:
        core, gate = gated(max_running=1)
        engine = AsyncEngine(core)
        await engine.start()
        first = asyncio.create_task(collect(engine, [1, 2], GREEDY, "a"))
        await asyncio.sleep(0)
        second = asyncio.create_task(collect(engine, [5] * 9, GREEDY, "b"))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        gate.may_run.release(100)
        await first
        await settle(engine)
        assert sum(gate.num_tokens) == 2 + 7
        await engine.stop()

    asyncio.run(main())


def test_refusals_come_before_anything_is_queued() -> None:
    async def main() -> None:
        core, gate = gated(num_blocks=8, max_model_len=100)
        engine = AsyncEngine(core, max_requests=1)
        with pytest.raises(QinferError, match="not running"):
            await collect(engine, [1], GREEDY, "early")
        await engine.start()
        with pytest.raises(ContextLengthError):
            await collect(engine, [1] * 200, GREEDY, "long")
        with pytest.raises(CapacityError, match="the cache holds 32"):
            await collect(engine, [1] * 40, GREEDY, "large")
        with pytest.raises(RequestError, match="empty"):
            await collect(engine, [], GREEDY, "empty")
        running = asyncio.create_task(collect(engine, [1], GREEDY, "x"))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="already in use"):
            await collect(engine, [1], GREEDY, "x")
        with pytest.raises(OverloadedError, match="try again later") as refused:
            await collect(engine, [1], GREEDY, "y")
        assert refused.value.retry_after == 1  # nothing has ended yet, so nothing is known
        gate.may_run.release(100)
        assert tokens_of(await running) == solo([1], GREEDY)
        await engine.stop()

    asyncio.run(main())


def test_a_failing_engine_ends_every_stream_with_an_error() -> None:
    """S10, E02: no client is left hanging, and health turns red."""

    class Broken(FakeRunner):
        def run(self, inputs: ModelInputs) -> ModelOutput:
            if len(self.num_tokens) == 3:
                assert opened.wait(60)
                raise RuntimeError("out of memory")
            return super().run(inputs)

    opened = threading.Event()  # or a slow event loop would open the last one too late

    async def main() -> None:
        core, runner = make_core()
        core._runner = Broken(len(runner.cache))
        engine = AsyncEngine(core)
        await engine.start()
        tasks = [asyncio.create_task(collect(engine, [i], LONG, str(i))) for i in range(3)]
        await asyncio.sleep(0)
        opened.set()
        results = await asyncio.gather(*tasks)
        for events in results:
            assert events[-1].finish_reason == "error"
            assert "out of memory" in (events[-1].error or "")
        assert not engine.healthy
        assert engine.failure == "RuntimeError: out of memory"
        with pytest.raises(QinferError, match="out of memory"):
            await collect(engine, [1], GREEDY, "late")
        await engine.stop()

    asyncio.run(main())


def test_stop_and_abort_end_open_streams() -> None:
    async def main() -> None:
        core, gate = gated()
        engine = AsyncEngine(core)
        await engine.start()
        tasks = [asyncio.create_task(collect(engine, [i], LONG, str(i))) for i in range(2)]
        await asyncio.sleep(0)
        engine.abort("0")
        engine.abort("unknown")
        assert (await tasks[0])[-1].finish_reason == "abort"
        gate.may_run.release(3)
        stopping = asyncio.create_task(engine.stop())
        gate.may_run.release(1000)
        await stopping
        assert (await tasks[1])[-1].finish_reason == "abort"
        assert core.scheduler.blocks.num_used == 0
        core.check_integrity()
        await engine.stop()

    asyncio.run(main())


def test_bad_rows_end_one_stream_with_the_reason() -> None:
    """G06, through the streams."""

    async def main() -> None:
        core, _ = make_core(poison=61)
        engine = AsyncEngine(core)
        await engine.start()
        good, bad = await asyncio.gather(
            collect(engine, [1, 2], GREEDY, "good"), collect(engine, [61, 2], GREEDY, "bad")
        )
        assert bad[-1].finish_reason == "error"
        assert "model.layers.1" in (bad[-1].error or "")
        assert tokens_of(good) == solo([1, 2], GREEDY)
        assert engine.healthy
        await engine.stop()

    asyncio.run(main())


def test_one_stream_for_several_prompts() -> None:
    async def main() -> None:
        core, _ = make_core()
        engine = AsyncEngine(core)
        await engine.start()
        prompts = {f"x-{i}": [i, i + 1, 7] for i in range(5)}
        ends = []
        texts: dict[int, list[int]] = {number: [] for number in range(5)}
        stream = engine.stream(prompts, GREEDY, on_end=lambda _, times: ends.append(times))
        async with aclosing(stream):
            async for batch in stream:
                for number, event in batch:
                    assert event.request_id == f"x-{number}"
                    texts[number] += event.token_ids
        assert texts == {i: solo([i, i + 1, 7], GREEDY) for i in range(5)}
        assert [times.tokens for times in ends] == [8] * 5
        assert all(0 <= (t.queue or 0) <= (t.ttft or -1) <= t.total for t in ends)
        assert engine.num_open == 0
        await engine.stop()

    asyncio.run(main())


def test_of_several_prompts_none_runs_if_one_is_refused() -> None:
    async def main() -> None:
        core, _ = make_core()
        engine = AsyncEngine(core, max_requests=2)
        await engine.start()
        with pytest.raises(RequestError, match="empty"):
            await anext(engine.stream({"a": [1], "b": []}, GREEDY))
        with pytest.raises(OverloadedError, match="0 requests are open and the limit is 2"):
            await anext(engine.stream({"a": [1], "b": [2], "c": [3]}, GREEDY))
        assert engine.num_open == 0
        assert engine.stats().prompt_tokens == 0
        await engine.stop()

    asyncio.run(main())


def test_what_the_engine_refuses_in_its_own_thread_hurts_nobody_else(monkeypatch) -> None:
    """S10: such an error once ended the engine; it belongs to the request that caused it."""

    async def main() -> None:
        core, _ = make_core()
        engine = AsyncEngine(core)
        await engine.start()
        add = core.add_request

        def refuse(request_id, prompt, params):
            if request_id.startswith("bad"):
                raise OverloadedError("the queue is full")
            add(request_id, prompt, params)

        monkeypatch.setattr(core, "add_request", refuse)
        good = asyncio.create_task(collect(engine, [1, 2], GREEDY, "good"))
        with pytest.raises(OverloadedError, match="the queue is full"):
            await collect(engine, [3, 4], GREEDY, "bad")
        assert tokens_of(await good) == solo([1, 2], GREEDY)
        assert engine.healthy
        assert engine.num_open == 0
        assert engine.latencies.ended["error"] == 0  # it was never taken on, so it did not fail
        await engine.stop()

    asyncio.run(main())


def test_a_reader_that_leaves_too_much_unread_loses_its_request(monkeypatch) -> None:
    """S01: a slow reader of a stream must not grow memory without bound."""
    monkeypatch.setattr("qinfer.engine.aio.MAX_UNREAD_EVENTS", 20)

    async def main() -> None:
        core, gate = gated()
        engine = AsyncEngine(core)
        await engine.start()
        slow = engine.stream({"slow": [1, 2]}, LONG)
        gate.may_run.release(2)
        await anext(slow)
        gate.may_run.release(1000)
        assert tokens_of(await collect(engine, [3, 4], GREEDY, "quick")) == solo([3, 4], GREEDY)
        await settle(engine)
        rest = [event async for batch in slow for _, event in batch]
        assert len(rest) == 20 + 2  # one too many, and the end
        assert rest[-1].finish_reason == "error"
        assert "reads too slowly" in (rest[-1].error or "")
        assert engine.stats().free_blocks == engine.stats().num_blocks
        assert engine.latencies.ended == {"error": 1, "length": 1}
        await engine.stop()

    asyncio.run(main())


def test_abort_all_ends_everything_that_is_open() -> None:
    async def main() -> None:
        core, gate = gated(max_running=1)
        engine = AsyncEngine(core)
        await engine.start()
        tasks = [asyncio.create_task(collect(engine, [i], LONG, str(i))) for i in range(3)]
        await asyncio.sleep(0)
        engine.abort_all()
        assert [(await task)[-1].finish_reason for task in tasks] == ["abort"] * 3
        gate.may_run.release(1000)
        await settle(engine)
        assert engine.latencies.ended == {"abort": 3}
        assert tokens_of(await collect(engine, [1], GREEDY, "0")) == solo([1], GREEDY)
        await engine.stop()

    asyncio.run(main())


def test_the_estimate_of_when_to_come_back() -> None:
    async def main() -> None:
        core, gate = gated(max_running=2)
        engine = AsyncEngine(core)
        await engine.start()
        for running, waiting in ((10.0, 0.0), (30.0, 0.0)):  # a mean of 20 seconds at work
            engine.latencies.total.add(running)
            engine.latencies.queue.add(waiting)
        tasks = [asyncio.create_task(collect(engine, [i], LONG, str(i))) for i in range(5)]
        await asyncio.sleep(0)
        gate.may_run.release(1)
        while engine.stats().running < 2:
            await asyncio.sleep(0.001)
        assert engine.retry_after() == 30  # three wait for two places of 20 seconds
        gate.may_run.release(1000)
        await asyncio.gather(*tasks)
        await engine.stop()

    asyncio.run(main())
