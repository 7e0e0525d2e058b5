"""Speculative decoding, exact: guesses are computed beside the last known token, then judged.

A step computes the last known token and the draft behind it at once. Its rows are then judged in
order: each is sampled just as in plain decoding, and the draft is right as far as it says what was
sampled. The first token that differs takes the place of the draft's; what follows it is dropped.

This is the rule of Leviathan et al. (arXiv 2211.17192) and Chen et al. (2302.01318). They accept a
token x that was drawn from q with probability min(1, p(x) / q(x)), and else draw from the positive
part of p - q. A draft here is a fixed token, so q is 1 at x: accept with probability p(x), else
draw from p without x. Drawing from p and accepting if it is x does both with one random number.

That number is a function of seed, sample and position, and the row does not depend on how many
tokens were computed with it. So not only the distribution but every single token is the one of
plain decoding, drawn ones too: a seed gives the same text with any drafter or none, whatever was
dropped for lack of room. Penalties, masks and stops see each accepted token before the next row is
sampled, so nothing of them ever has to be taken back.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from qinfer.engine.drafting import Drafter
from qinfer.engine.jobs import Generation
from qinfer.engine.payoff import Payoff
from qinfer.engine.request import FinishReason, Request, RequestStatus, TokenLogprob
from qinfer.engine.sampler import Sampled, sample
from qinfer.kvcache.inputs import ModelOutput

Clock = Callable[[], float]


@dataclass(slots=True)
class Verdict:
    """What a step gave a request.

    Args:
        job: the request.
        row: of the logits after its last known token; those after the draft's tokens follow.
        num_drafted: tokens of its draft that were computed.
        chosen: its new tokens.
        texts: the text that became certain with each.
        reason: why the last of them ended it.
        bad_layer: the next row is not finite, first in this layer.
    """

    job: Generation
    row: int
    num_drafted: int = 0
    chosen: list[Sampled] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reason: FinishReason | None = None
    bad_layer: int | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The new tokens."""
        return tuple(choice.token_id for choice in self.chosen)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """One entry per new token, if asked for."""
        entries = tuple(c.logprob for c in self.chosen if c.logprob is not None)
        return entries if len(entries) == len(self.chosen) else None

    @property
    def next_row(self) -> int:
        """The row that follows what was chosen."""
        return self.row + len(self.chosen)

    @property
    def num_right(self) -> int:
        """Drafted tokens that came true."""
        return min(len(self.chosen) - self._is_wrong(), self.num_drafted)

    def take(self, choice: Sampled) -> bool:
        """Add a token; True if the draft foresaw it, so that the next row counts too."""
        request = self.job.request
        self.chosen.append(choice)
        request.tokens.append(choice.token_id)
        text, self.reason = self.job.output.push(choice.token_id)
        self.texts.append(text)
        return self.reason is None and not self._is_wrong() and self.next_row <= self._last_row

    def withdraw(self) -> None:
        """Take the new tokens off the request again: the scheduler adds them."""
        if self.chosen:
            del self.job.request.tokens[-len(self.chosen) :]

    @property
    def _last_row(self) -> int:
        return self.row + self.num_drafted

    def _is_wrong(self) -> bool:
        """Tell whether the newest token is not what the draft says."""
        count, draft = len(self.chosen), self.job.request.draft
        return 0 < count <= self.num_drafted and draft[count - 1] != self.chosen[-1].token_id


def judge(jobs: Sequence[tuple[Generation, int]], output: ModelOutput) -> list[Verdict]:
    """Return what a step gave each request: as much of its draft as is right, and one token more.

    Args:
        jobs: requests whose drafts were computed, each with the row after its last known token.
        output: of the step.
    """
    bad_layers: list[int] = output.bad_layers.tolist()
    verdicts = [Verdict(job, row, len(job.request.draft)) for job, row in jobs]
    going = verdicts
    try:
        while going:
            going = _judge_next_rows(going, output.logits, bad_layers)
    finally:
        for verdict in verdicts:
            verdict.withdraw()
    return verdicts


def _judge_next_rows(
    verdicts: Sequence[Verdict], logits: torch.Tensor, bad_layers: Sequence[int]
) -> list[Verdict]:
    """Give each request one token more and return those whose drafts are right so far."""
    finite = []
    for verdict in verdicts:
        layer = bad_layers[verdict.next_row]
        if layer >= 0:
            verdict.bad_layer = layer
        else:
            finite.append(verdict)
    rows = [(v.next_row, v.job.request, v.job.sampler) for v in finite]
    choices = sample(logits, rows) if rows else []
    return [v for v, choice in zip(finite, choices, strict=True) if v.take(choice)]


class Speculator:
    """Drafts where it pays.

    Args:
        drafter: makes the guesses.
        max_length: tokens of a draft at most.
        clock: seconds; what drafting costs and yields is measured with it.
    """

    def __init__(
        self, drafter: Drafter, max_length: int, *, clock: Clock = time.perf_counter
    ) -> None:
        self._drafter = drafter
        self._payoff = Payoff(max_length)
        self._max_length = max_length
        self._clock = clock
        self._started = 0.0

    def draft(self, requests: Sequence[Request]) -> None:
        """Set the drafts of those requests that decode in the next step."""
        requests = [request for request in requests if _decodes(request)]
        rooms = [
            min(request.max_length - request.num_tokens - 1, self._max_length)
            for request in requests
        ]
        lengths = self._payoff.lengths([request.id for request in requests], rooms)
        wanted = {r.id: n for r, n in zip(requests, lengths, strict=True) if n}
        ready = self._drafter.prepare([r for r in requests if r.id in wanted]) if wanted else []
        if ready:
            start = self._clock()
            drafts = self._drafter.propose(ready, [wanted[request.id] for request in ready])
            longest = max(map(len, drafts))
            self._payoff.add_draft(longest, self._clock() - start)
            for request, draft in zip(ready, drafts, strict=True):
                request.draft[:] = draft
        self._started = self._clock()

    def learn(self, verdicts: Sequence[Verdict], num_requests: int, num_tokens: int) -> None:
        """Record what became of the drafts, and what the step took since they were made.

        Args:
            verdicts: of the step.
            num_requests: that it computed something for.
            num_tokens: that it computed.
        """
        num_drafted = sum(verdict.num_drafted for verdict in verdicts)
        if num_tokens == num_requests + num_drafted:  # the step only decoded
            self._payoff.steps.add(num_tokens, self._clock() - self._started)
        for verdict in verdicts:
            request_id = verdict.job.request.id
            self._payoff.add_result(request_id, verdict.num_drafted, verdict.num_right)

    def forget(self, request_id: str) -> None:
        """Let go of a request that has ended."""
        self._payoff.forget(request_id)
        self._drafter.forget(request_id)


def _decodes(request: Request) -> bool:
    """Tell whether one known token is all that a request has left to compute."""
    running = request.status is RequestStatus.RUNNING
    return running and request.num_tokens - request.num_computed == 1
