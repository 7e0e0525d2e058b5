"""How long requests take: histograms over an engine's life, and the rate of the last seconds.

Times are seconds on the monotonic clock, taken where the engine ends a step, so that neither a
slow client nor a busy event loop shows in them. Whoever exposes the numbers reads them from here;
this module knows no format. Torch-free.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from qinfer.engine.request import FinishReason, TokenEvent, Usage

RATE_WINDOW_SECONDS = 10

# vLLM's bounds, with finer ones below for small models on fast machines.
_TTFT: tuple[float, ...] = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_TOKEN: tuple[float, ...] = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST: tuple[float, ...] = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LENGTH = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))


class Histogram:
    """Counts of values by bucket: bucket `i` holds those up to `bounds[i]`, the last the rest.

    Args:
        bounds: ascending upper bounds, each part of its bucket.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    @property
    def count(self) -> int:
        """Values seen."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Rate:
    """Events per second over the last full seconds."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque(maxlen=RATE_WINDOW_SECONDS + 1)

    def add(self, count: int, now: float) -> None:
        """Count `count` events at time `now`."""
        second = int(now)
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1] = (second, self._seconds[-1][1] + count)
        else:
            self._seconds.append((second, count))

    def per_second(self, now: float) -> float:
        """Return the mean over the window that ends with the last full second."""
        current = int(now)
        counted = sum(
            count for second, count in self._seconds if 0 < current - second <= RATE_WINDOW_SECONDS
        )
        return counted / RATE_WINDOW_SECONDS


@dataclass(slots=True)
class Clock:
    """When one sequence did what; monotonic seconds.

    Args:
        arrival: it came to the engine.
        first: its first token was there; None = none yet.
        last: its newest token was there.
        tokens: tokens so far.
    """

    arrival: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class SequenceTimes:
    """What a finished sequence took, in seconds.

    Args:
        queue: until its first step began; None if it never got one.
        ttft: until its first token; None if there was none.
        tpot: mean time of each further token; None below two tokens.
        total: until its end.
        tokens: it got so many.
    """

    queue: float | None
    ttft: float | None
    tpot: float | None
    total: float
    tokens: int


@dataclass(slots=True)
class Latencies:
    """All histograms of an engine. A prompt with `n` samples counts as `n` sequences, as in vLLM.

    Args:
        ttft: arrival to first token.
        inter_token: between two deliveries of one sequence; a step may deliver several tokens.
        time_per_token: (last - first) / (tokens - 1) of each finished sequence.
        total: arrival to end; like the rest below of sequences that ended by themselves, so that
            what clients cut short does not make the engine look fast.
        queue: arrival to the first step.
        prompt_tokens: lengths of prompts.
        generation_tokens: lengths of answers.
        ended: sequences that ended, by reason, whoever ended them; each exactly once.
        generated: tokens per second of late.
    """

    ttft: Histogram = field(default_factory=lambda: Histogram(_TTFT))
    inter_token: Histogram = field(default_factory=lambda: Histogram(_TOKEN))
    time_per_token: Histogram = field(default_factory=lambda: Histogram(_TOKEN))
    total: Histogram = field(default_factory=lambda: Histogram(_REQUEST))
    queue: Histogram = field(default_factory=lambda: Histogram(_REQUEST))
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(_LENGTH))
    generation_tokens: Histogram = field(default_factory=lambda: Histogram(_LENGTH))
    ended: Counter[FinishReason] = field(default_factory=Counter)
    generated: Rate = field(default_factory=Rate)

    def delivered(self, clock: Clock, num_tokens: int, now: float) -> None:
        """Note new tokens of a sequence."""
        if clock.first is None:
            clock.first = now
            self.ttft.add(now - clock.arrival)
        else:
            self.inter_token.add(now - clock.last)
        clock.last = now
        clock.tokens += num_tokens

    def finished(self, clock: Clock, event: TokenEvent, now: float) -> SequenceTimes:
        """Note the end of a sequence and return its times."""
        times = sequence_times(clock, event.queue_seconds, now)
        if event.finish_reason is not None:
            self.ended[event.finish_reason] += 1
        if event.finish_reason in {"stop", "length"} and event.usage is not None:
            self._count(times, event.usage)
        return times

    def _count(self, times: SequenceTimes, usage: Usage) -> None:
        self.total.add(times.total)
        self.prompt_tokens.add(usage.prompt_tokens)
        self.generation_tokens.add(usage.completion_tokens)
        if times.tpot is not None:
            self.time_per_token.add(times.tpot)
        if times.queue is not None:
            self.queue.add(times.queue)


def sequence_times(clock: Clock, queue: float | None, now: float) -> SequenceTimes:
    """Return the times of a sequence that ends now."""
    ttft = None if clock.first is None else clock.first - clock.arrival
    tpot = None
    if clock.first is not None and clock.tokens > 1:
        tpot = (clock.last - clock.first) / (clock.tokens - 1)
    return SequenceTimes(queue, ttft, tpot, now - clock.arrival, clock.tokens)
