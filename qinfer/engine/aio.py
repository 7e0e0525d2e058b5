"""An asynchronous face for the synchronous engine: one thread, one queue each way.

The engine thread owns the core. Commands (add, abort, stop) go in through a queue that it reads
between steps; the events of each step come out as one call on the event loop, which only puts
them into the streams. So delivery never blocks the engine, and a slow client holds up nobody: one
that leaves too much unread loses its request. If the engine fails, every open stream ends with an
error event and nothing is accepted any more.
"""

import asyncio
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from qinfer.engine.beams import BeamParams
from qinfer.engine.core import EngineCore
from qinfer.engine.latency import Clock, Latencies, sequence_times
from qinfer.engine.metrics import EngineStats
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import FinishReason, TokenEvent
from qinfer.engine.streams import Lane, OnEnd, Stream, StreamItem
from qinfer.errors import OverloadedError, QinferError, RequestError

DEFAULT_MAX_REQUESTS = 1024
MAX_UNREAD_EVENTS = 1024  # of one sequence: some hundred kilobytes
MAX_RETRY_SECONDS = 120

_log = logging.getLogger(__name__)


Params = SamplingParams | BeamParams


@dataclass(frozen=True, slots=True)
class _Add:
    key: str
    prompt: tuple[int, ...]
    params: Params


@dataclass(frozen=True, slots=True)
class _Abort:
    key: str


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command = _Add | _Abort | _Stop


class AsyncEngine:
    """Runs an engine core in a thread of its own and streams its events.

    Its methods belong to one event loop, that of `start`. While it runs, the core is its own:
    nobody else may step it or add requests to it.

    Args:
        core: the engine.
        max_requests: open requests beyond which new ones are refused.

    Attributes:
        latencies: how long everything took so far.
    """

    def __init__(self, core: EngineCore, *, max_requests: int = DEFAULT_MAX_REQUESTS) -> None:
        self.max_requests = max_requests
        self.latencies = Latencies()
        self._core = core
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lanes: dict[str, Lane] = {}
        self._keys: dict[str, str] = {}  # request id -> key of the lane
        # Aborted here, but not yet in the engine: late events under these keys must not reach a
        # request that was opened under the same id since.
        self._leaving: set[str] = set()
        self._serial = itertools.count()
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Why the engine can serve no more; None while it is well."""
        return self._failure

    @property
    def healthy(self) -> bool:
        """Whether the engine runs."""
        return self._failure is None and self._thread is not None and self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._lanes)

    async def start(self) -> None:
        """Start the engine thread; events will arrive on the running loop."""
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._run, args=(loop,), name="qinfer-engine", daemon=True
        )
        self._thread.start()

    async def stop(self) -> None:
        """End the engine thread after its current step; open streams end with `abort`."""
        if self._thread is None:
            return
        self._inbox.put(_Stop())
        await asyncio.to_thread(self._thread.join)
        self._thread = None
        for lane in list(self._lanes.values()):
            self._core.abort(lane.key)
            self._end(lane, "abort", None)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: Params,
        request_id: str,
    ) -> AsyncGenerator[TokenEvent, None]:
        """Yield the events of a request's `n` samples as they come, told apart by their index.

        A beam search tells of nothing but the ends of its best sequences. Closing the generator
        before its end aborts the request at the next step.

        Raises:
            RequestError: the request is invalid, too long (ContextLengthError), or its id in use.
            CapacityError: it can never fit, or too many are open at the moment (OverloadedError).
            QinferError: the engine has failed or is not running.
        """
        async with aclosing(self.stream({request_id: prompt_token_ids}, params)) as batches:
            async for batch in batches:
                for _, event in batch:
                    yield event

    async def stream(
        self,
        prompts: Mapping[str, Sequence[int]],
        params: Params,
        *,
        on_end: OnEnd | None = None,
    ) -> AsyncGenerator[list[StreamItem], None]:
        """Yield the events of several requests, each with its prompt's number, as they come.

        All that came since the last time are yielded together. Closing the generator before its
        end aborts what is left at the next step.

        Args:
            prompts: token ids by request id; numbered in their order.
            params: of all of them.
            on_end: called with the last event of each sequence and what the sequence took,
                however it ended.

        Raises:
            QinferError: as `generate`; then none of them is run.
        """
        stream = self._open(prompts, params, on_end)
        try:
            while not stream.exhausted:
                yield await stream.take()
        finally:
            if stream.unfinished:
                self._drop_all(stream, "abort", None)

    def prepare(self, params: Params) -> None:
        """Do what takes long for a request before it is opened; any thread may call.

        Raises:
            RequestError: structured output that cannot be followed.
        """
        if isinstance(params, SamplingParams):
            self._core.prepare(params)

    def abort(self, request_id: str) -> None:
        """End an open request at the next step; its stream ends with `abort`."""
        key = self._keys.get(request_id)
        if key is not None:
            self._drop(self._lanes[key], "abort", None)

    def abort_all(self) -> None:
        """End every open request at the next step; their streams end with `abort`."""
        for request_id in list(self._keys):
            self.abort(request_id)

    def stats(self) -> EngineStats:
        """Return the engine's numbers now."""
        return self._core.stats()

    def retry_after(self) -> int:
        """Return in how many seconds the requests that wait now may have got their turn."""
        total, queued = self.latencies.total, self.latencies.queue
        if total.count == 0:
            return 1
        running_seconds = max(total.total - queued.total, 0.0) / total.count
        stats = self.stats()
        waiting = max(stats.waiting, self.num_open - stats.running, 1)
        seconds = running_seconds * waiting / max(stats.running, 1)
        return min(max(math.ceil(seconds), 1), MAX_RETRY_SECONDS)

    def _open(
        self, prompts: Mapping[str, Sequence[int]], params: Params, on_end: OnEnd | None
    ) -> Stream:
        """Check requests, pass them to the engine thread, and return their stream."""
        if not self.healthy:
            state = "it was not started" if self._thread is None else "it has stopped"
            raise QinferError(f"the engine is not running: {self._failure or state}")
        for request_id in prompts:
            if request_id in self._keys:
                raise RequestError(
                    f"request id {request_id!r} is already in use", field="request_id"
                )
        if self.num_open + len(prompts) > self.max_requests:
            raise OverloadedError(
                f"{self.num_open} requests are open and the limit is {self.max_requests}; "
                "try again later",
                retry_after=self.retry_after(),
            )
        for prompt in prompts.values():
            self._core.check(prompt, params)
        stream = Stream(on_end)
        now = time.monotonic()
        for number, (request_id, prompt) in enumerate(prompts.items()):
            lane = Lane(self._new_key(request_id), request_id, number, stream)
            lane.clocks = {index: Clock(now) for index in range(params.n)}
            stream.unfinished += params.n
            self._lanes[lane.key] = lane
            self._keys[request_id] = lane.key
            self._inbox.put(_Add(lane.key, tuple(prompt), params))
        return stream

    def _new_key(self, request_id: str) -> str:
        """Return the engine's name for a request: its id, unless that has not left yet."""
        key = request_id
        while key in self._leaving or key in self._lanes:
            key = f"{request_id}~{next(self._serial)}"
        return key

    def _drop_all(self, stream: Stream, reason: FinishReason, error: str | None) -> None:
        """End what is left of a stream, here and in the engine."""
        for lane in [lane for lane in self._lanes.values() if lane.stream is stream]:
            self._drop(lane, reason, error)

    def _drop(self, lane: Lane, reason: FinishReason, error: str | None) -> None:
        self._leaving.add(lane.key)
        self._inbox.put(_Abort(lane.key))
        self._end(lane, reason, error)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work until told to stop: the engine thread."""
        try:
            while self._obey(loop):
                events = self._core.step()
                if events:
                    loop.call_soon_threadsafe(self._deliver, events, time.monotonic())
        except Exception as error:  # noqa: BLE001 - the edge: no client may be left hanging
            _log.exception("the engine has failed")
            loop.call_soon_threadsafe(self._fail, f"{type(error).__name__}: {error}")

    def _obey(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Carry out what is in the inbox; wait for it if there is no work. False means stop."""
        while True:
            try:
                command = self._inbox.get(block=not self._core.has_unfinished)
            except queue.Empty:
                return True
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Abort):
                self._core.abort(command.key)
                loop.call_soon_threadsafe(self._leaving.discard, command.key)
                continue
            try:
                self._core.add_request(command.key, command.prompt, command.params)
            except QinferError as error:  # its own fault, and nobody else's business
                loop.call_soon_threadsafe(self._refuse, command.key, error)

    def _deliver(self, events: Sequence[TokenEvent], now: float) -> None:
        """Put a step's events into their streams; on the event loop."""
        num_tokens = 0
        for event in events:
            lane = self._lanes.get(event.request_id)
            if lane is not None:
                num_tokens += len(event.token_ids)
                self._pass_on(lane, event, now)
        self.latencies.generated.add(num_tokens, now)

    def _pass_on(self, lane: Lane, event: TokenEvent, now: float) -> None:
        """Put one event into its stream, and close what it ends."""
        if lane.key is not lane.request_id:
            event = replace(event, request_id=lane.request_id)
        clock = lane.clocks[event.index]
        if event.token_ids:
            self.latencies.delivered(clock, len(event.token_ids), now)
        lane.stream.put((lane.number, event))
        if event.finish_reason is not None:
            self._close(lane, event, now)
        elif lane.stream.num_unread > MAX_UNREAD_EVENTS * lane.stream.unfinished:
            # Before a reader that does not keep up costs more memory.
            unread = f"{lane.stream.num_unread} events are waiting for it"
            self._drop_all(lane.stream, "error", f"the client reads too slowly: {unread}")

    def _close(self, lane: Lane, event: TokenEvent, now: float, *, ran: bool = True) -> None:
        """Take a sequence off the books, and its lane if it was the last.

        One that the engine never took on (`ran` is false) is no sequence that failed.
        """
        clock = lane.clocks.pop(event.index)
        if ran:
            times = self.latencies.finished(clock, event, now)
        else:
            times = sequence_times(clock, None, now)
        lane.stream.unfinished -= 1
        if not lane.clocks:
            del self._lanes[lane.key]
            del self._keys[lane.request_id]
        if lane.stream.on_end is not None:
            lane.stream.on_end(event, times)

    def _fail(self, reason: str) -> None:
        """Tell everybody that the engine is gone; on the event loop."""
        self._failure = reason
        for lane in list(self._lanes.values()):
            self._end(lane, "error", f"the engine has failed: {reason}")

    def _refuse(self, key: str, error: QinferError) -> None:
        """Give a reader the error for which the engine did not take a request; on the loop."""
        lane = self._lanes.get(key)
        if lane is None:
            return
        if isinstance(error, OverloadedError):
            error.retry_after = self.retry_after()
        lane.stream.refuse(error)
        self._end(lane, "error", str(error), ran=False)

    def _end(
        self, lane: Lane, reason: FinishReason, error: str | None, *, ran: bool = True
    ) -> None:
        """Close a lane with a last event for each of its unfinished samples."""
        now = time.monotonic()
        for index in sorted(lane.clocks):
            event = TokenEvent(
                lane.request_id, (), "", index=index, finish_reason=reason, error=error
            )
            lane.stream.put((lane.number, event))
            self._close(lane, event, now, ran=ran)
