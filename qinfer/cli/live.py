"""One request at the terminal: its events as they come, and Ctrl-C between two steps."""

import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Self

from qinfer.engine.core import EngineCore
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import TokenEvent
from qinfer.errors import NonFiniteError

_REQUEST_ID = "terminal"


class Interruption:
    """While open, Ctrl-C sets `requested` instead of tearing a step of the engine apart."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Self:
        """Take Ctrl-C over."""
        self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give Ctrl-C back."""
        signal.signal(signal.SIGINT, self._previous)

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True


def stream(
    core: EngineCore, prompt_token_ids: list[int], params: SamplingParams
) -> Iterator[TokenEvent]:
    """Yield a request's events until its end or Ctrl-C.

    Raises:
        RequestError: the engine refuses the request.
        NonFiniteError: its numbers broke down.
    """
    core.add_request(_REQUEST_ID, prompt_token_ids, params)
    finished = False
    try:
        with Interruption() as interruption:
            while not finished and not interruption.requested:
                for event in core.step():
                    if event.finish_reason == "error":
                        raise NonFiniteError(event.error or "the request failed")
                    finished = event.finish_reason is not None
                    yield event
    finally:
        core.abort(_REQUEST_ID)  # nothing to do if it has ended
