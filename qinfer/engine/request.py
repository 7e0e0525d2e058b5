"""The vocabulary of the engine: sampling parameters, requests and what comes back. Torch-free."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, TypeVar

from qinfer.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_N = 64
_INT64_MAX = 2**63 - 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop; vLLM's names.

    None in the first five means: the model's generation_config, else the neutral value.

    Args:
        temperature: 0 = greedy (ties go to the lowest id); default 1.
        top_k: keep the k most likely tokens; 0 or -1 = all.
        top_p: keep the smallest set whose probability reaches p, in (0, 1].
        min_p: keep tokens of at least p times the highest probability, in [0, 1].
        repetition_penalty: divides (multiplies, if negative) the logits of tokens that the prompt
            or output holds (CTRL, arXiv 1909.05858, section 4.1); 1 = off.
        max_tokens: tokens to generate at most; None = up to the context limit.
        min_tokens: no stop before that many tokens.
        stop: strings that end the text; not part of it unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the text, beside the model's EOS set.
        ignore_eos: go on past the EOS set.
        seed: makes the draw reproducible whatever else is in the batch; None = different each time.
        n: independent samples per prompt.
        logprobs: report the chosen token's log-probability and those of so many top tokens, of
            the model's own distribution (before temperature and penalties); None = none.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the matched stop string in the text.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        """Refuse values outside their range, naming the field.

        Raises:
            RequestError: the first field that is invalid.
        """
        object.__setattr__(self, "stop", _as_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_ids(self.stop_token_ids))
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_integer("top_k", self.top_k, -1, _INT64_MAX)
        _check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_integer("max_tokens", self.max_tokens, 0, _INT64_MAX)
        _check_integer("min_tokens", self.min_tokens, 0, _INT64_MAX)
        _check_integer("seed", self.seed, -(2**63), _INT64_MAX)
        _check_integer("n", self.n, 1, MAX_N)
        _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_stop(self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What an unset sampling field means; from generation_config, or neutral."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def apply(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with every unset field filled in."""
        return replace(
            params,
            temperature=_default(params.temperature, self.temperature),
            top_k=_default(params.top_k, self.top_k),
            top_p=_default(params.top_p, self.top_p),
            min_p=_default(params.min_p, self.min_p),
            repetition_penalty=_default(params.repetition_penalty, self.repetition_penalty),
        )


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
        use_prefix_cache: may start from cached blocks of an equal prefix.
        status: where it is in its life.
        finish_reason: why it ended.
        num_computed: tokens whose K and V are in the cache.
        block_ids: the cache blocks it holds, in order.
        block_hashes: hash chain over its full blocks, as far as it was needed.
        num_cached: prompt tokens that were found in the cache when it was first admitted.
        num_preemptions: how often it lost its blocks and had to start again.
        arrival: seconds on the monotonic clock when it was added.
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
    use_prefix_cache: bool = True
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached: int = 0
    num_preemptions: int = 0
    arrival: float = 0.0

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
        return self.num_tokens if self.score_next is not None else self.max_length - 1

    @property
    def max_reusable(self) -> int:
        """Leading tokens that may come from the cache: beyond them logits are wanted."""
        if not self.use_prefix_cache:
            return 0
        return self.num_tokens - 1 if self.score_next is None else self.score_next

    def wanted_rows(self, num_new: int) -> range:
        """Return the positions among the next `num_new` whose logits are wanted.

        A scored request wants all from `score_next` on; any other wants its last known token's,
        as soon as everything before it is computed.
        """
        end = self.num_computed + num_new
        if self.score_next is not None:
            return range(max(self.num_computed, self.score_next), end)
        return range(end - 1, end) if end == self.num_tokens else range(0)


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
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None


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
    """One generated sequence; `error` says what happened when `finish_reason` is `error`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics


def _as_tuple(stop: object) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
        raise RequestError("stop must be a string or a list of strings", field="stop")
    return tuple(stop)


def _as_ids(token_ids: object) -> tuple[int, ...]:
    if not isinstance(token_ids, list | tuple | set | frozenset):
        raise RequestError("stop_token_ids must be a list of integers", field="stop_token_ids")
    for token_id in token_ids:
        if token_id is None:
            raise RequestError("stop_token_ids must be integers", field="stop_token_ids")
        _check_integer("stop_token_ids", token_id, 0, _INT64_MAX)
    return tuple(token_ids)


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(
            f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed", field="stop"
        )
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise RequestError(
                f"each stop string must have 1 to {MAX_STOP_CHARS} characters", field="stop"
            )


def _check_number(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, not {value!r}", field=name)
    if not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} is {value}; it must be in {bracket}{low}, {high}]", field=name)


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {value!r}", field=name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}; it must be from {low} to {high}", field=name)


def _default(value: T | None, fallback: T) -> T:
    return fallback if value is None else value
