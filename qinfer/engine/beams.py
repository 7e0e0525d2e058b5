"""Beam search over one prompt, with the semantics of transformers' `generate`. Torch-free.

The search knows tokens, scores and ends; who computes the logits and holds the cache is not its
business. A step takes the most likely next tokens of every open beam and answers which beam
continues with which token; a beam that continues with several is forked by the caller.

What transformers does, and so this does:

    score       sum of log-probabilities / (generated tokens ** length_penalty), the end token
                counted; a positive penalty favours long sequences, a negative one short ones
    candidates  the best `beams * max(2, 1 + end tokens)` continuations of all open beams
    finished    a candidate among the first `beams` that ends; the best `beams` of them are kept
    open        the best `beams` candidates that do not end
    the end     at `max_tokens`; or when there are `beams` finished ones and, by `early_stopping`,
                True: at once; False: the best open beam, scored as if it ended now, beats none of
                them; "never": the same with the length at which an open beam could score best
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from qinfer.engine.params import SamplingParams
from qinfer.errors import RequestError

MAX_BEAMS = 64
MAX_LENGTH_PENALTY = 100.0

EarlyStopping = bool | Literal["never"]
Candidate = tuple[int, float]  # a next token and its log-probability


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """How a beam search runs; nothing is drawn, so there is no temperature and no seed.

    Args:
        beam_width: open beams, and finished sequences that are kept; at least 2.
        num_return_sequences: of the finished ones, how many are returned, best first.
        max_tokens: tokens to generate at most; None = up to the context limit.
        length_penalty: exponent of the length by which a score is divided.
        early_stopping: see the module.
        stop: strings that end a sequence; not part of it unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end a sequence, beside the model's EOS set.
        ignore_eos: go on past the EOS set.
        priority: requests of a lower number run first.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the matched stop string in the text.
    """

    beam_width: int = 4
    num_return_sequences: int = 1
    max_tokens: int | None = 16
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        """Refuse values outside their range, naming the field.

        Raises:
            RequestError: the first field that is invalid.
        """
        _check_count("beam_width", self.beam_width, 2, MAX_BEAMS)
        _check_count("num_return_sequences", self.num_return_sequences, 1, self.beam_width)
        if self.max_tokens is not None:
            _check_count("max_tokens", self.max_tokens, 1, 2**63 - 1)
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float):
            raise RequestError(
                f"length_penalty must be a number, not {penalty!r}", field="length_penalty"
            )
        if not abs(penalty) <= MAX_LENGTH_PENALTY:
            raise RequestError(
                f"length_penalty is {penalty}; it must be from {-MAX_LENGTH_PENALTY} to "
                f"{MAX_LENGTH_PENALTY}",
                field="length_penalty",
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError(
                f'early_stopping must be true, false or "never", not {self.early_stopping!r}',
                field="early_stopping",
            )
        checked = self.as_sampling()
        object.__setattr__(self, "stop", checked.stop)
        object.__setattr__(self, "stop_token_ids", checked.stop_token_ids)

    @property
    def n(self) -> int:
        """Sequences that the request gives, as `SamplingParams.n`."""
        return self.num_return_sequences

    def as_sampling(self) -> SamplingParams:
        """Return what every beam has in common with a greedy request.

        Raises:
            RequestError: a field that both have is invalid.
        """
        return SamplingParams(
            temperature=0.0,
            repetition_penalty=1.0,
            max_tokens=self.max_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            priority=self.priority,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence.

    Args:
        tokens: what was generated, an end token included.
        score: what it is ranked by.
        stopped: it ended by itself, not at `max_tokens`.
    """

    tokens: tuple[int, ...]
    score: float
    stopped: bool


@dataclass(frozen=True, slots=True)
class Beam:
    """An open sequence: generated tokens, and the sum of their log-probabilities."""

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class Continuation:
    """An open beam of the next step: which of this step's it continues, and with what token."""

    parent: int
    token: int


@dataclass(slots=True)
class BeamSearch:
    """The state of one search.

    Args:
        params: how it runs.
        max_tokens: generated tokens at which every beam ends.
        end_ids: tokens that end a beam.
        stops: whether a beam's tokens (the newest one last) end in a stop string.
        beams: the open beams; one empty one at first.
        finished: the best `beam_width` finished sequences so far, best first.
    """

    params: BeamParams
    max_tokens: int
    end_ids: frozenset[int] = frozenset()
    stops: Callable[[tuple[int, ...]], bool] | None = None
    beams: list[Beam] = field(default_factory=lambda: [Beam()])
    finished: list[Hypothesis] = field(default_factory=list)

    @property
    def num_candidates(self) -> int:
        """Most likely tokens of each beam that a step needs to see."""
        return self.params.beam_width * max(2, 1 + len(self.end_ids))

    def step(self, candidates: Sequence[Sequence[Candidate]]) -> list[Continuation]:
        """Take one step and return the open beams of the next; none: the search is over.

        Args:
            candidates: for each open beam its `num_candidates` most likely next tokens (all
                tokens, if there are fewer) with their log-probabilities.
        """
        width = self.params.beam_width
        pool = [
            (beam.logprob + logprob, index, token)
            for index, (beam, choices) in enumerate(zip(self.beams, candidates, strict=True))
            for token, logprob in choices
            if logprob > -math.inf
        ]
        # Of equal scores the earlier beam and the lower token come first.
        pool.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
        beams: list[Beam] = []
        continuations: list[Continuation] = []
        for rank, (score, parent, token) in enumerate(pool[: self.num_candidates]):
            tokens = (*self.beams[parent].tokens, token)
            stopped = self._stops(tokens)
            if stopped or len(tokens) >= self.max_tokens:
                if rank < width:
                    self._finish(Hypothesis(tokens, self._scored(score, len(tokens)), stopped))
            elif len(beams) < width:
                beams.append(Beam(tokens, score))
                continuations.append(Continuation(parent, token))
        self.beams = beams
        return [] if self._is_over() else continuations

    def results(self) -> list[Hypothesis]:
        """Return the sequences to give back, best first, once the search is over."""
        return self.finished[: self.params.num_return_sequences]

    def _stops(self, tokens: tuple[int, ...]) -> bool:
        return tokens[-1] in self.end_ids or (self.stops is not None and self.stops(tokens))

    def _finish(self, hypothesis: Hypothesis) -> None:
        self.finished.append(hypothesis)
        self.finished.sort(key=lambda entry: -entry.score)  # stable: the earlier one stays ahead
        del self.finished[self.params.beam_width :]

    def _is_over(self) -> bool:
        """Whether no open beam is left, or none is expected to beat the finished ones."""
        params = self.params
        if not self.beams:
            return True
        if len(self.finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        length = len(self.beams[0].tokens)
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.max_tokens
        return self._scored(self.beams[0].logprob, length) <= self.finished[-1].score

    def _scored(self, logprob: float, length: int) -> float:
        return float(logprob / length**self.params.length_penalty)


def _check_count(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {value!r}", field=name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}; it must be from {low} to {high}", field=name)
