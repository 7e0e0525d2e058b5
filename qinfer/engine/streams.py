"""What one reader follows: the events of its requests, kept until read, and never too many.

Everything here belongs to the event loop. Torch-free.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from qinfer.engine.latency import Clock, SequenceTimes
from qinfer.engine.request import TokenEvent
from qinfer.errors import QinferError

# (number of the prompt in its stream, what happened to it)
StreamItem = tuple[int, TokenEvent]
OnEnd = Callable[[TokenEvent, SequenceTimes], None]


class Stream:
    """Events of one or several requests for one reader, who takes all that are there at once.

    A reader that falls behind gets several steps in one piece, so that what it costs per token
    falls as the load rises.

    Args:
        on_end: called with the last event of each sequence and what the sequence took, however it
            ended; None = nobody asks.
    """

    def __init__(self, on_end: OnEnd | None = None) -> None:
        self.on_end = on_end
        self.unfinished = 0  # sequences whose last event has not come
        self._items: list[StreamItem] = []
        self._refusal: QinferError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def num_unread(self) -> int:
        """Events that the reader has not taken."""
        return len(self._items)

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left to read and nothing more will come."""
        return not self._items and self._refusal is None and self.unfinished == 0

    def put(self, item: StreamItem) -> None:
        """Add an event and wake the reader."""
        self._items.append(item)
        self._wake()

    def refuse(self, error: QinferError) -> None:
        """Make the next reading raise `error`."""
        self._refusal = error
        self._wake()

    async def take(self) -> list[StreamItem]:
        """Return all unread events, at least one.

        Raises:
            QinferError: the engine refused a request of the stream.
        """
        while not self._items and self._refusal is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._refusal is not None:
            raise self._refusal
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True)
class Lane:
    """One request of a stream: a prompt and its samples.

    Args:
        key: the engine's name for it.
        request_id: the caller's.
        number: of the prompt in its stream.
        stream: where its events go.
        clocks: of its unfinished samples, by index.
    """

    key: str
    request_id: str
    number: int
    stream: Stream
    clocks: dict[int, Clock] = field(default_factory=dict)
