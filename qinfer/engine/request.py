"""The vocabulary of the engine: requests and what comes back. Torch-free."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from qinfer.engine.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the engine; the scheduler catches `num_computed` up with `num_tokens`.

    Args:
        id: unique in the engine.
        tokens: prompt and output token ids; grows by the sampled ones.
        num_prompt: how many of `tokens` are the prompt.
        params: filled-in sampling parameters (no None among the defaulted fields).
        max_length: tokens of prompt and output at which it ends with `length`.
        parent: what its events are addressed to; the samples of one prompt share it.
        index: which of the `n` samples of its prompt it is.
        seed: of its draws; always set, so that a preempted request draws the same again.
        stop_ids: tokens that end it.
        score_next: None, or the request is scored instead of continued: the first position whose
            distribution over the next token is still wanted.
        prompt_next: None, or its prompt's log-probabilities are wanted: the first position whose
            distribution over the next token still is.
        use_prefix_cache: may start from cached blocks of an equal prefix.
        rank: (priority, number of arrival), set by the scheduler; lower ranks are served first.
        forked: it began with the blocks of another request, beside the limit on running ones.
        status: where it is in its life.
        finish_reason: why it ended.
        num_computed: tokens whose K and V are in the cache.
        draft: proposed continuation of `tokens`; computed with them in the next step as far as
            budget and blocks allow (the rest is dropped), and kept where it turns out right.
        block_ids: the cache blocks it holds, in order.
        block_hashes: hash chain over its full blocks, as far as it was needed.
        num_cached: prompt tokens that were found in the cache when it was first admitted.
        num_preemptions: how often it lost its blocks and had to start again.
        arrival: seconds on the monotonic clock when it was added.
        started: the same when its first step began; None before.
    """

    id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    max_length: int
    parent: str = ""
    index: int = 0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    score_next: int | None = None
    prompt_next: int | None = None
    use_prefix_cache: bool = True
    rank: tuple[int, ...] = ()
    forked: bool = False
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed: int = 0
    draft: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached: int = 0
    num_preemptions: int = 0
    arrival: float = 0.0
    started: float | None = None

    @property
    def queue_seconds(self) -> float | None:
        """How long it waited for its first step; None if that never came."""
        return None if self.started is None else self.started - self.arrival

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def max_slots(self) -> int:
        """Tokens whose K and V it can ever hold; the last generated one is never read."""
        if self.score_next is not None:
            return self.num_tokens
        return max(self.max_length - 1, self.num_prompt)

    @property
    def max_reusable(self) -> int:
        """Leading tokens that may come from the cache: beyond them logits are wanted."""
        if not self.use_prefix_cache:
            return 0
        return self.num_tokens - 1 if self.score_next is None else self.score_next

    def upcoming(self, num_new: int) -> list[int]:
        """Return the next `num_new` token ids to compute: known ones, then the draft."""
        start, end = self.num_computed, self.num_computed + num_new
        return self.tokens[start:end] + self.draft[: max(end - self.num_tokens, 0)]

    def wanted_rows(self, num_new: int) -> range:
        """Return the positions among the next `num_new` whose logits are wanted.

        A scored request wants all from `score_next` on; any other wants its last known token's,
        as soon as everything before it is computed, and those of the draft behind it, and
        before that all of its prompt from `prompt_next` on.
        """
        end = self.num_computed + num_new
        first = len(self.tokens) - 1 if self.score_next is None else self.score_next
        if self.prompt_next is not None:
            first = min(first, self.prompt_next)
        return range(max(self.num_computed, first), end)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token's log-probability under the model, and the most likely tokens beside it.

    Args:
        token_id: the chosen token.
        logprob: natural logarithm of its probability.
        top: `(token_id, logprob)` of the most likely tokens, best first; as many as asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One step's news of one request: newly visible text, and the end if it came.

    Args:
        request_id: whose it is.
        index: which of the `n` samples of the prompt.
        token_ids: tokens sampled since the last event (usually one).
        text: text that became certain; may be empty while bytes or a stop string are pending.
        logprobs: one entry per token id, if asked for.
        finish_reason: set on the last event.
        usage: set on the last event.
        error: the message, when `finish_reason` is `error`.
        prompt_logprobs: on the first event of a sample whose request asks for them: one entry per
            token of the prompt, None for the first, which nothing predicts.
        queue_seconds: on the last event: how long it waited for its first step.
        score: of a beam search: what the sequence is ranked by.
        contradictory: the error is the request's own: what it asks for leaves no token to choose.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    queue_seconds: float | None = None
    score: float | None = None
    contradictory: bool = False


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request in seconds.

    Args:
        ttft: from arrival to the first token; None if there was none.
        tpot: (last - first) / (tokens - 1); None below two tokens.
        latency: from arrival to the end.
    """

    ttft: float | None
    tpot: float | None
    latency: float


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence.

    Args:
        index: its place among the outputs of its prompt.
        text: of the tokens.
        token_ids: what was generated, an end token included.
        finish_reason: why it ended.
        logprobs: one entry per token, if asked for.
        error: what happened, when `finish_reason` is `error`.
        score: of a beam search: what the sequence is ranked by.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
