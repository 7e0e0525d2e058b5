"""Whether drafting pays: what comes true, held against what a longer step costs. Torch-free.

A step yields tokens and takes seconds. Drafting one token more is worth it as long as the tokens
that it is expected to add, per second that it adds, exceed what the step yields per second without
it. Both sides are measured while the engine runs: the seconds of a step by its number of tokens,
the seconds of the drafter, and the share of drafted tokens that came true, per request and over
all of them. Where it does not pay it is left out, and tried again ever more seldom; where it does,
a step without drafts shows now and then what one costs.

The choice depends on a clock, so two runs may draft differently; no token depends on it.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

PROBE_AFTER = 32
MAX_PROBE_AFTER = 512
PLAIN_EVERY = 64

_MAX_STEP = 512  # larger steps are prefill, and tell nothing about verifying a few tokens
_STEP_WEIGHT = 0.15
_OUTLIER = 3.0
_REQUEST_DECAY = 0.85
_ENGINE_DECAY = 0.97
_PRIOR_WEIGHT = 3.0
_FIRST_GUESS = 0.7


class StepCosts:
    """Seconds of a step by its number of tokens: moving averages, and lines between them.

    A size counts as known from its second step on, and begins with the shorter of the two: the
    first may have had to prepare memory for that size.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._seconds: dict[int, float] = {}
        self._first: dict[int, float] = {}

    def add(self, num_tokens: int, seconds: float) -> None:
        """Record a step; one that took far longer than expected counts as an outlier."""
        if not 1 <= num_tokens <= _MAX_STEP:
            return
        known = self._seconds.get(num_tokens)
        if known is not None:
            self._seconds[num_tokens] += _STEP_WEIGHT * (min(seconds, _OUTLIER * known) - known)
        elif num_tokens in self._first:
            insort(self._sizes, num_tokens)
            self._seconds[num_tokens] = min(self._first.pop(num_tokens), seconds)
        else:
            self._first[num_tokens] = seconds

    def estimate(self, num_tokens: int) -> float:
        """Return the seconds of a step; beyond all sizes seen, those of the nearest one."""
        at = bisect_left(self._sizes, num_tokens)
        if at < len(self._sizes) and self._sizes[at] == num_tokens:
            return self._seconds[num_tokens]
        above = self._sizes[at : at + 1]
        below = self._sizes[max(at - 1, 0) : at]
        if not (below and above):
            return self._seconds[(below or above)[0]] if self._sizes else 0.0
        (low,), (high,) = below, above
        share = (num_tokens - low) / (high - low)
        return (1 - share) * self._seconds[low] + share * self._seconds[high]

    def knows(self, num_tokens: int) -> bool:
        """Tell whether a step of that size, or a smaller one, was measured."""
        return bool(self._sizes) and self._sizes[0] <= num_tokens

    def extra(self, num_tokens: int, num_more: int) -> float:
        """Return the seconds that `num_more` tokens add to a step, at least 0."""
        return max(self.estimate(num_tokens + num_more) - self.estimate(num_tokens), 0.0)


@dataclass(slots=True)
class Rate:
    """How often drafted tokens come true, the latest ones counting most."""

    hits: float = 0.0
    trials: float = 0.0

    def add(self, num_drafted: int, num_right: int, decay: float) -> None:
        """Record a verified draft; behind the first wrong token nothing was tried."""
        self.hits = decay * self.hits + num_right
        self.trials = decay * self.trials + min(num_right + 1, num_drafted)

    def value(self, prior: float) -> float:
        """Return the rate, which starts at `prior`."""
        return (self.hits + _PRIOR_WEIGHT * prior) / (self.trials + _PRIOR_WEIGHT)


@dataclass(slots=True)
class _History:
    """What is known of one request."""

    rate: Rate = field(default_factory=Rate)
    idle_steps: int = 0
    probe_after: int = PROBE_AFTER


class Payoff:
    """Decides how many tokens are worth drafting.

    Args:
        max_length: tokens of a draft at most.
    """

    def __init__(self, max_length: int) -> None:
        self.steps = StepCosts()
        self._max_length = max_length
        self._rate = Rate()
        self._requests: dict[str, _History] = {}
        self._steps_drafted = 0
        self._draft_seconds: float | None = None  # of the drafter, per token of the longest draft

    def add_draft(self, longest: int, seconds: float) -> None:
        """Record how long the drafter took for drafts of which the longest has so many tokens."""
        each = seconds / max(longest, 1)
        known = self._draft_seconds
        if known is not None:
            each = known + _STEP_WEIGHT * (min(each, _OUTLIER * known) - known)
        self._draft_seconds = each

    def add_result(self, request_id: str, num_drafted: int, num_right: int) -> None:
        """Record what became of a draft."""
        if num_drafted:
            self._rate.add(num_drafted, num_right, _ENGINE_DECAY)
            self._history(request_id).rate.add(num_drafted, num_right, _REQUEST_DECAY)

    def forget(self, request_id: str) -> None:
        """Let go of a request that has ended."""
        self._requests.pop(request_id, None)

    def lengths(self, request_ids: Sequence[str], rooms: Sequence[int]) -> list[int]:
        """Return how many tokens to draft for each request that decodes in the next step.

        Args:
            request_ids: the requests.
            rooms: tokens that may still be drafted for each.
        """
        histories = [self._history(request_id) for request_id in request_ids]
        if not self.steps.knows(len(histories)) or self._steps_drafted == PLAIN_EVERY:
            self._steps_drafted = 0
            return [0] * len(histories)
        lengths = self._worthwhile(histories, rooms)
        for index, history in enumerate(histories):
            if lengths[index]:
                history.idle_steps, history.probe_after = 0, PROBE_AFTER
                continue
            history.idle_steps += 1
            if history.idle_steps >= history.probe_after and rooms[index]:
                lengths[index] = min(rooms[index], self._max_length)
                history.idle_steps = 0
                history.probe_after = min(2 * history.probe_after, MAX_PROBE_AFTER)
        self._steps_drafted += any(lengths)
        return lengths

    def _worthwhile(self, histories: Sequence[_History], rooms: Sequence[int]) -> list[int]:
        """Return the lengths that are expected to yield most tokens per second.

        Depths are tried to the last: the second row of a step may cost more than the next ones.
        """
        prior = self._rate.value(_FIRST_GUESS)
        rates = [history.rate.value(prior) for history in histories]
        size = len(rates)
        gained, seconds = float(len(rates)), self.steps.estimate(size)
        slope = self.steps.extra(size, len(rates) * self._max_length)
        slope /= max(len(rates) * self._max_length, 1)
        lengths = [0] * len(rates)
        best, best_gained, best_seconds = lengths, gained, seconds
        drafting = list(range(len(rates)))
        for depth in range(1, self._max_length + 1):
            drafting = [
                index
                for index in drafting
                if depth <= rooms[index] and rates[index] ** depth * seconds >= slope * gained
            ]
            if not drafting:
                break
            gained += sum(rates[index] ** depth for index in drafting)
            seconds += self.steps.extra(size, len(drafting)) + (self._draft_seconds or 0.0)
            size += len(drafting)
            lengths = list(lengths)
            for index in drafting:
                lengths[index] = depth
            if gained * best_seconds >= best_gained * seconds:
                best, best_gained, best_seconds = lengths, gained, seconds
        return best

    def _history(self, request_id: str) -> _History:
        return self._requests.setdefault(request_id, _History())
