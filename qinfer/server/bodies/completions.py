"""Body of POST /v1/completions."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import PlainValidator, model_validator

from qinfer.engine.beams import BeamParams
from qinfer.engine.params import MAX_N, SamplingParams
from qinfer.errors import RequestError
from qinfer.server.bodies.base import TokenIds, Unused, check_text
from qinfer.server.bodies.generation import MAX_SEQUENCES, GenerationRequest, check_max_tokens

MAX_PROMPTS = 256
Prompt = str | list[str] | TokenIds | list[TokenIds]


def parse_prompt(value: Any) -> Prompt:
    """Return a prompt that is text, token ids, or a list of either.

    Written by hand because a union of lists would validate every item once per alternative.

    Raises:
        RequestError: it is something else, empty, or too many.
        ValueError: text that is no valid Unicode.
    """
    if isinstance(value, str):
        return check_text(value)
    if not isinstance(value, list) or not value:
        raise RequestError(
            f"prompt must be text or a list, and not empty{_it_is(value)}", field="prompt"
        )
    if are_ids(value):
        return value
    if len(value) > MAX_PROMPTS:
        raise RequestError(
            f"{len(value)} prompts in one request; at most {MAX_PROMPTS} are allowed",
            field="prompt",
        )
    if all(isinstance(item, str) for item in value):
        return [check_text(item) for item in value]
    if all(isinstance(item, list) and item and are_ids(item) for item in value):
        return value
    raise RequestError(
        "prompt must be text, token ids, or a list of texts or of non-empty lists of token ids",
        field="prompt",
    )


def are_ids(items: list[Any]) -> bool:
    """Tell whether a list holds integers only; one pass without Python code."""
    return set(map(type, items)) == {int}  # there may be a million


class CompletionRequest(GenerationRequest):
    """Text or token ids to continue."""

    unsupported: ClassVar[Unused] = {**GenerationRequest.unsupported, "suffix": (None, "")}

    prompt: Annotated[Prompt, PlainValidator(parse_prompt, json_schema_input_type=Prompt)]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of is not None and not self.num_shown <= self.best_of <= MAX_N:
            raise RequestError(
                f"best_of is {self.best_of}; it must be from n={self.num_shown} to {MAX_N}",
                field="best_of",
            )
        if self.use_beam_search and self.num_samples > self.num_shown:
            raise RequestError("best_of does not go with use_beam_search", field="best_of")
        if self.stream and self.num_samples > self.num_shown:
            raise RequestError(
                "best_of larger than n cannot be streamed: which text is best shows at the end",
                field="best_of",
            )
        return self

    @property
    def prompts(self) -> Sequence[str | TokenIds]:
        """The prompts as a list, also where the request has a single one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def num_shown(self) -> int:
        """Sequences of each prompt in the answer."""
        return 1 if self.n is None else self.n

    @property
    def num_samples(self) -> int:
        """Sequences that are generated for each prompt."""
        return self.num_shown if self.best_of is None else self.best_of

    @property
    def only_prompt(self) -> bool:
        """Whether nothing is to be generated: the prompt itself is what is asked about."""
        return bool(self.echo) and self.max_tokens == 0

    def params(self) -> SamplingParams | BeamParams:
        """Return the engine's parameters.

        Raises:
            RequestError: a field is out of its range, or n times prompts are too many.
        """
        if self.num_samples * len(self.prompts) > MAX_SEQUENCES:
            raise RequestError(
                f"{len(self.prompts)} prompts times {self.num_samples} samples exceed "
                f"{MAX_SEQUENCES} sequences",
                field="n" if self.best_of is None else "best_of",
            )
        limit = check_max_tokens(self.max_tokens, least=0 if self.echo else 1)
        if self.use_beam_search:
            return self.beam_params(limit, logprobs=self.logprobs is not None)
        given = {
            "max_tokens": 1 if self.only_prompt else limit,
            "logprobs": self.logprobs,
            "n": self.num_samples,
        }
        if self.only_prompt:
            given["min_tokens"] = 0
        if self.echo and self.logprobs is not None:
            given["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        if self.num_samples > self.num_shown and self.logprobs is None:
            given["logprobs"] = 0  # what the samples are ranked by
        return self.sampling_params(**given)


def _it_is(value: Any) -> str:
    return "" if isinstance(value, list) else f", not {type(value).__name__}"
