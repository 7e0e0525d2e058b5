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

from qinfer.engine.drafting import Drafter
from qinfer.engine.jobs import Generation
from qinfer.engine.payoff import Payoff
from qinfer.engine.request import FinishReason, Request, RequestStatus, TokenLogprob
from qinfer.engine.sampler import Sampled, Sampler
from qinfer.kvcache.inputs import ModelOutput

Clock = Callable[[], float]


@dataclass(slots=True)
class Verdict:
    """What a step gave a request.

    Args:
        job: the request.
        row: of the logits after its last known token; those after the draft's tokens follow.
        draft: the tokens that were computed on trial.
        chosen: its new tokens.
        texts: the text that became certain with each.
        num_right: drafted tokens that came true.
        reason: why the last of them ended it.
        bad_layer: the next row is not finite, first in this layer.
        error: why no token was left to choose.
    """

    job: Generation
    row: int
    draft: tuple[int, ...] = ()
    chosen: list[Sampled] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_right: int = 0
    reason: FinishReason | None = None
    bad_layer: int | None = None
    error: str | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The new tokens."""
        return tuple(choice.token_id for choice in self.chosen)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """One entry per new token, if asked for."""
        entries = tuple(c.logprob for c in self.chosen if c.logprob is not None)
        return entries or None

    @property
    def next_row(self) -> int:
        """The row that follows what was chosen."""
        return self.row + len(self.chosen)

    def take(self, choice: Sampled) -> bool:
        """Add a token; True if the draft foresaw it, so that the next row counts too."""
        if choice.error is not None:
            self.error = choice.error
            return False
        foreseen = self.draft[len(self.chosen) : len(self.chosen) + 1] == (choice.token_id,)
        self.num_right += foreseen
        self.chosen.append(choice)
        self.job.request.tokens.append(choice.token_id)
        text, self.reason = self.job.output.push(choice.token_id)
        self.texts.append(text)
        return foreseen and self.reason is None

    def withdraw(self) -> None:
        """Take the new tokens off the request again: the scheduler adds them."""
        if self.chosen:
            del self.job.request.tokens[-len(self.chosen) :]


def judge(
    jobs: Sequence[tuple[Generation, int]], output: ModelOutput, sampler: Sampler
) -> list[Verdict]:
    """Return what a step gave each request: as much of its draft as is right, and one token more.

    Args:
        jobs: requests whose drafts were computed, each with the row after its last known token.
        output: of the step.
        sampler: chooses the tokens.
    """
    bad_layers: list[int] = output.bad_layers.tolist()
    verdicts = [Verdict(job, row, tuple(job.request.draft)) for job, row in jobs]
    going = verdicts
    try:
        while going:
            going = _judge_next_rows(going, output, bad_layers, sampler)
    finally:
        for verdict in verdicts:
            verdict.withdraw()
    return verdicts


def _judge_next_rows(
    verdicts: Sequence[Verdict], output: ModelOutput, bad_layers: Sequence[int], sampler: Sampler
) -> list[Verdict]:
    """Give each request one token more and return those whose drafts are right so far."""
    finite = []
    for verdict in verdicts:
        layer = bad_layers[verdict.next_row]
        if layer >= 0:
            verdict.bad_layer = layer
        else:
            finite.append(verdict)
    choices = sampler.sample(output, [(v.next_row, v.job.sampler) for v in finite])
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
        num_drafted = sum(len(verdict.draft) for verdict in verdicts)
        if num_tokens == num_requests + num_drafted:  # the step only decoded
            self._payoff.steps.add(num_tokens, self._clock() - self._started)
        for verdict in verdicts:
            request_id = verdict.job.request.id
            self._payoff.add_result(request_id, len(verdict.draft), verdict.num_right)

    def forget(self, request_id: str) -> None:
        """Let go of a request that has ended."""
        self._payoff.forget(request_id)
        self._drafter.forget(request_id)


def _decodes(request: Request) -> bool:
    """Tell whether one known token is all that a request has left to compute."""
    running = request.status is RequestStatus.RUNNING
    return running and request.num_tokens - request.num_computed == 1
