"""The fields that all requests for generated text share. Ranges belong to `SamplingParams`."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from qinfer.engine.beams import BeamParams
from qinfer.engine.params import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from qinfer.errors import RequestError
from qinfer.server.bodies.base import Name, Text, Unused, Wire
from qinfer.server.bodies.structured import StructureFields

MAX_SEQUENCES = 512  # prompts times samples
MAX_STOP_TOKEN_IDS = 256
MAX_ALLOWED_TOKEN_IDS = 262_144  # more than any vocabulary has
_ONLY_IN_BEAMS = {"beam_width", "length_penalty", "early_stopping"}
# What changes the choice of tokens, and the value that means it does not; a beam search takes the
# most likely ones as they are. Temperature and the like are for draws, which it has none of.
_NOT_IN_BEAMS: dict[str, Any] = {
    "min_tokens": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "allowed_token_ids": (),
    "bad_words": [],
    "prompt_logprobs": -1,
}


def _check_biases(value: Any) -> Any:
    """Refuse too many before each is looked at."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"{len(value)} entries; at most {MAX_BIASES} are allowed")
    return value


ShortText = Annotated[Text, Field(max_length=MAX_STOP_CHARS)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Biases = Annotated[
    dict[TokenKey, float], BeforeValidator(_check_biases), Field(max_length=MAX_BIASES)
]


class StreamOptions(Wire):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with include_usage: in every chunk
    include_obfuscation: bool | None = None  # padding against traffic analysis; never added


class GenerationRequest(StructureFields):
    """The fields that completions and chat completions share."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {"metadata", "prediction", "prompt_cache_key", "prompt_cache_retention"}
        | {"safety_identifier", "service_tier", "store", "user"}
        | {"guided_decoding_backend"}
    )
    unsupported: ClassVar[Unused] = {
        "audio": (None,),
        "function_call": (None, "none"),
        "functions": (None, []),
        "guided_whitespace_pattern": (None,),
        "modalities": (None, ["text"]),
        "reasoning_effort": (None,),
        "verbosity": (None,),
        "web_search_options": (None,),
    }

    model: Name | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: Annotated[list[int], Field(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[ShortText], Field(max_length=MAX_BAD_WORDS)] | None = None
    seed: int | None = None
    n: int | None = None
    stop: ShortText | Annotated[list[ShortText], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    priority: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_streaming(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for stream=true only", field="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs are given with whole answers only, not with stream=true",
                field="prompt_logprobs",
            )
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the counts so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def sampling_params(self, **given: Any) -> SamplingParams:
        """Return the engine's sampling parameters.

        Args:
            given: fields that are named differently in each kind of request.

        Raises:
            RequestError: a field is out of its range.
        """
        values = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()}
            or None,
            "allowed_token_ids": None
            if self.allowed_token_ids is None
            else tuple(self.allowed_token_ids),
            "bad_words": tuple(self.bad_words or ()),
            "min_tokens": self.min_tokens or 0,
            "stop": () if self.stop is None else self.stop,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": self.ignore_eos,
            "seed": self.seed,
            "n": 1 if self.n is None else self.n,
            "prompt_logprobs": self.prompt_logprobs,
            "priority": self.priority or 0,
            "structured": self.structured(),
            "skip_special_tokens": self.skip_special_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
        }
        return SamplingParams(**values | given)

    def beam_params(self, max_tokens: int | None, *, logprobs: bool) -> BeamParams:
        """Return the parameters of a beam search; `n` of its beams are the choices.

        Args:
            max_tokens: tokens to generate at most; None = up to the context limit.
            logprobs: log-probabilities of tokens are asked for.

        Raises:
            RequestError: a field is out of its range, or means nothing in a beam search.
        """
        n = 1 if self.n is None else self.n
        structure = None if self.structured() is None else self.structure_field
        for name in ("logprobs" if logprobs else None, structure):
            if name is not None:
                raise RequestError(f"{name} does not go with use_beam_search", field=name)
        given = self.model_dump(include=set(_NOT_IN_BEAMS), exclude_none=True)
        for name, value in given.items():
            if value != _NOT_IN_BEAMS[name]:
                raise RequestError(f"{name} does not go with use_beam_search", field=name)
        return BeamParams(
            beam_width=max(n, 2) if self.beam_width is None else self.beam_width,
            num_return_sequences=n,
            max_tokens=max_tokens,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=False if self.early_stopping is None else self.early_stopping,
            stop=() if self.stop is None else self.stop,  # type: ignore[arg-type] # text or list; made a tuple there
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            priority=self.priority or 0,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )

    @model_validator(mode="after")
    def _check_beams(self) -> Self:
        given = self.model_dump(include=_ONLY_IN_BEAMS, exclude_none=True)
        if given and not self.use_beam_search:
            name = next(iter(given))
            raise RequestError(f"{name} needs use_beam_search=true", field=name)
        return self


def check_max_tokens(value: int | None, field: str = "max_tokens", least: int = 1) -> int | None:
    """Return a limit on generated tokens.

    Raises:
        RequestError: it is below `least`.
    """
    if value is not None and value < least:
        raise RequestError(f"{field} is {value}; it must be at least {least}", field=field)
    return value
