"""A prompt or a sequence on its way through the core: events in, a finished result out."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from qinfer.engine.beams import BeamParams
from qinfer.engine.core import EngineCore
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenEvent,
    TokenLogprob,
)
from qinfer.errors import NonFiniteError

OnLogprobs = Callable[[int, int, torch.Tensor], None]


@dataclass(slots=True)
class _Sample:
    """One of a prompt's outputs as it grows."""

    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    score: float | None = None
    first_time: float | None = None
    last_time: float = 0.0

    def take(self, event: TokenEvent, now: float) -> None:
        """Add an event."""
        if event.token_ids:
            self.first_time = now if self.first_time is None else self.first_time
        self.last_time = now
        self.token_ids += event.token_ids
        self.text.append(event.text)
        self.logprobs += event.logprobs or ()
        self.finish_reason = event.finish_reason
        self.error = event.error
        self.score = event.score

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None below two tokens, or if all came at once."""
        if self.first_time in {None, self.last_time} or len(self.token_ids) < 2:
            return None
        return (self.last_time - self.first_time) / (len(self.token_ids) - 1)


class GenerationRun:
    """A prompt of `generate` or `beam_search` on its way through the core."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams | BeamParams,
    ) -> None:
        self.id = request_id
        self._prompt = prompt
        self._token_ids = token_ids
        self._params = params
        self._samples = [_Sample() for _ in range(params.n)]
        self._arrival = 0.0
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    def add_to(self, core: EngineCore) -> None:
        """Queue the request."""
        self._arrival = time.perf_counter()
        core.add_request(self.id, self._token_ids, self._params)
        self._token_ids = core.limits.check_prompt(self._token_ids)

    def take(self, event: TokenEvent) -> bool:
        """Add an event; True when that was the last."""
        self._samples[event.index].take(event, time.perf_counter())
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        return all(sample.finish_reason is not None for sample in self._samples)

    def output(self) -> RequestOutput:
        """Return the finished result."""
        samples = self._samples
        firsts = [sample.first_time for sample in samples if sample.first_time is not None]
        tpots = [sample.tpot for sample in samples if sample.tpot is not None]
        metrics = RequestMetrics(
            ttft=min(firsts) - self._arrival if firsts else None,
            tpot=sum(tpots) / len(tpots) if tpots else None,
            latency=max(sample.last_time for sample in samples) - self._arrival,
        )
        params = self._params
        wants_logprobs = isinstance(params, SamplingParams) and params.logprobs is not None
        outputs = [
            CompletionOutput(
                index=index,
                text="".join(sample.text),
                token_ids=sample.token_ids,
                finish_reason=sample.finish_reason or "abort",
                logprobs=sample.logprobs if wants_logprobs else None,
                error=sample.error,
                score=sample.score,
            )
            for index, sample in enumerate(samples)
        ]
        return RequestOutput(self._prompt, self._token_ids, outputs, metrics, self._prompt_logprobs)


class ScoringRun:
    """A sequence of `score` on its way through the core."""

    def __init__(
        self,
        request_id: str,
        index: int,
        token_ids: list[int],
        *,
        start: int,
        use_prefix_cache: bool,
        on_logprobs: OnLogprobs | None,
    ) -> None:
        self.id = request_id
        self._token_ids = token_ids
        self._start = start
        self._use_prefix_cache = use_prefix_cache
        self.logprobs: list[float] = []
        self._index = index
        self._on_logprobs = on_logprobs

    def add_to(self, core: EngineCore) -> None:
        """Queue the request."""
        core.add_score(
            self.id,
            self._token_ids,
            self._take_rows,
            start=self._start,
            use_prefix_cache=self._use_prefix_cache,
        )

    def take(self, event: TokenEvent) -> bool:
        """Notice the last event.

        Raises:
            NonFiniteError: the sequence ended with an error.
        """
        if event.finish_reason == "error":
            raise NonFiniteError(f"sequence {self._index}: {event.error}")
        return True

    def _take_rows(self, position: int, rows: torch.Tensor) -> None:
        following = self._token_ids[position + 1 : position + 1 + rows.shape[0]]
        targets = torch.tensor(following, device=rows.device).unsqueeze(1)
        self.logprobs += rows.gather(1, targets).squeeze(1).tolist()
        if self._on_logprobs is not None:
            self._on_logprobs(self._index, position, rows)
