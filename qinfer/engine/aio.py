"""An asynchronous face for the synchronous engine: one thread, one queue each way.

The engine thread owns the core. Commands (add, abort, stop) go in through a queue that it reads
between steps; the events of each step come out as one call on the event loop, which only puts
them into the streams' queues. So delivery never blocks the engine, and a slow client holds up
nobody. If the engine fails, every open stream ends with an error event and nothing is accepted
any more.
"""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

from qinfer.engine.core import EngineCore
from qinfer.engine.metrics import EngineStats
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import FinishReason, TokenEvent
from qinfer.errors import OverloadedError, QinferError, RequestError

DEFAULT_MAX_REQUESTS = 1024

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Add:
    key: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class _Abort:
    key: str


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command = _Add | _Abort | _Stop


@dataclass(slots=True)
class _Stream:
    """An open request.

    Args:
        request_id: the caller's name for it.
        unfinished: indices of the samples whose last event was not read yet.
        events: what was not read yet.
    """

    request_id: str
    unfinished: set[int]
    events: "asyncio.Queue[TokenEvent]" = field(default_factory=asyncio.Queue)


class AsyncEngine:
    """Runs an engine core in a thread of its own and streams its events.

    Its methods belong to one event loop, that of `start`. While it runs, the core is its own:
    nobody else may step it or add requests to it.

    Args:
        core: the engine.
        max_requests: open requests beyond which new ones are refused.
    """

    def __init__(self, core: EngineCore, *, max_requests: int = DEFAULT_MAX_REQUESTS) -> None:
        self._core = core
        self._max_requests = max_requests
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        # By a key of our own: late events of an aborted request must not reach one that was
        # opened under the same id since.
        self._streams: dict[str, _Stream] = {}
        self._keys: dict[str, str] = {}  # request id -> key
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
        for key in list(self._streams):
            self._core.abort(key)
            self._end(key, "abort", None)

    async def generate(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[TokenEvent, None]:
        """Yield the events of a request's `n` samples as they come, told apart by their index.

        Closing the generator before its end aborts the request at the next step.

        Raises:
            RequestError: the request is invalid, too long (ContextLengthError), or its id in use.
            CapacityError: it can never fit, or too many are open at the moment (OverloadedError).
            QinferError: the engine has failed or is not running.
        """
        key = self._open(prompt_token_ids, params, request_id)
        stream = self._streams[key]
        try:
            while stream.unfinished:
                event = await stream.events.get()
                if event.finish_reason is not None:
                    stream.unfinished.discard(event.index)
                yield event
        finally:
            self._forget(key)
            if stream.unfinished:
                self._inbox.put(_Abort(key))

    def abort(self, request_id: str) -> None:
        """End an open request at the next step; its stream ends with `abort`."""
        key = self._keys.get(request_id)
        if key is not None:
            self._inbox.put(_Abort(key))
            self._end(key, "abort", None)

    def stats(self) -> EngineStats:
        """Return the engine's numbers now."""
        return self._core.stats()

    def _open(self, prompt: Sequence[int], params: SamplingParams, request_id: str) -> str:
        """Check a request, pass it to the engine thread, and return its stream's key."""
        if not self.healthy:
            raise QinferError(f"the engine is not running: {self._failure or 'it was not started'}")
        if request_id in self._keys:
            raise RequestError(f"request id {request_id!r} is already in use", field="request_id")
        if len(self._streams) >= self._max_requests:
            raise OverloadedError(
                f"{len(self._streams)} requests are open, which is the limit; try again later"
            )
        self._core.check(prompt, params)
        key = f"{next(self._serial)}:{request_id}"
        self._streams[key] = _Stream(request_id, set(range(params.n)))
        self._keys[request_id] = key
        self._inbox.put(_Add(key, tuple(prompt), params))
        return key

    def _forget(self, key: str) -> None:
        """Take a stream off the books, if it still is on them."""
        stream = self._streams.pop(key, None)
        if stream is not None:
            del self._keys[stream.request_id]

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work until told to stop: the engine thread."""
        try:
            while self._obey():
                events = self._core.step()
                if events:
                    loop.call_soon_threadsafe(self._deliver, events)
        except Exception as error:  # noqa: BLE001 - the edge: no client may be left hanging
            _log.exception("the engine has failed")
            loop.call_soon_threadsafe(self._fail, f"{type(error).__name__}: {error}")

    def _obey(self) -> bool:
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
            else:
                self._core.add_request(command.key, command.prompt, command.params)

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        """Put a step's events into their streams; on the event loop."""
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.events.put_nowait(replace(event, request_id=stream.request_id))

    def _fail(self, reason: str) -> None:
        """Tell everybody that the engine is gone; on the event loop."""
        self._failure = reason
        for key in list(self._streams):
            self._end(key, "error", f"the engine has failed: {reason}")

    def _end(self, key: str, reason: FinishReason, error: str | None) -> None:
        """Close a stream with a last event for each of its unfinished samples."""
        stream = self._streams[key]
        self._forget(key)
        for index in sorted(stream.unfinished):
            stream.events.put_nowait(
                TokenEvent(
                    stream.request_id, (), "", index=index, finish_reason=reason, error=error
                )
            )
