"""What the core does with the logits of a request, and the events it tells of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from qinfer.engine.logprobs import PromptScores
from qinfer.engine.output import OutputStream
from qinfer.engine.request import FinishReason, Request, TokenEvent, Usage
from qinfer.engine.sampler import SamplerState

RowSink = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Generation:
    """A request that is continued, and what turns its logits into tokens and text."""

    request: Request
    sampler: SamplerState
    output: OutputStream
    prompt: PromptScores | None = None


@dataclass(frozen=True, slots=True)
class Scoring:
    """A request that is scored, and who wants its rows."""

    request: Request
    sink: RowSink


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of a step's logits belong to a request; `position` is that of the first."""

    start: int
    stop: int
    position: int

    def at(self, position: int) -> int:
        """Return the row of a position."""
        return self.start + position - self.position


def usage_of(request: Request) -> Usage:
    """Return the token counts of a request so far."""
    return Usage(request.num_prompt, request.num_output, request.num_cached)


def last_event(request: Request, reason: FinishReason, error: str | None = None) -> TokenEvent:
    """Return an event that tells the end of a request and nothing else."""
    return TokenEvent(
        request_id=request.parent,
        index=request.index,
        token_ids=(),
        text="",
        finish_reason=reason,
        usage=usage_of(request),
        error=error,
        queue_seconds=request.queue_seconds,
    )
