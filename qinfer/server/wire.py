"""What clients send: OpenAI's request bodies, with a bound on every field.

Policy for fields: what is listed here is honoured; `IGNORED` fields carry no meaning for the
answer and are dropped; `UNSUPPORTED` fields change the answer and are accepted only at the value
that means "not used"; every other field is refused by name, as OpenAI does. Values are strict: a
number is not taken from text. Ranges of sampling fields belong to `SamplingParams`.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator

from qinfer.engine.params import MAX_STOP_CHARS, MAX_STOP_STRINGS, SamplingParams
from qinfer.errors import RequestError

MAX_PROMPTS = 256
MAX_SEQUENCES = 512  # prompts times n
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_NAME_CHARS = 256
MAX_TEMPLATE_FIELDS = 16
# Names that mean something to the renderer itself, not to the template.
RESERVED_TEMPLATE_FIELDS = frozenset(
    {"messages", "conversation", "chat_template", "add_generation_prompt", "tokenize"}
    | {"continue_final_message", "tools", "documents", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)

IGNORED = frozenset(
    {"metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
    | {"service_tier", "store", "user"}
)
# field -> values that mean it is not used
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None, []),
    "audio": (None,),
    "bad_words": (None, []),
    "beam_width": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_json": (None,),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "typical_p": (None, 1),
    "use_beam_search": (None, False),
    "verbosity": (None,),
    "web_search_options": (None,),
}
_UNSUPPORTED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "reasoning_content": (None, ""),
    "refusal": (None, ""),
    "tool_calls": (None, []),
}


def check_text(text: str) -> str:
    """Refuse half a surrogate pair, which JSON can spell but no tokenizer can read.

    Raises:
        ValueError: there is one; pydantic turns this into an error that names the field.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"lone surrogate at character {error.start}") from error
    return text


Text = Annotated[str, AfterValidator(check_text)]
Name = Annotated[Text, Field(max_length=MAX_NAME_CHARS)]
TokenIds = list[int]
Prompt = str | list[str] | TokenIds | list[TokenIds]


class _Wire(BaseModel):
    """Base of the request bodies: strict values, no unknown fields, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Wire):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis; never added


class GenerationRequest(_Wire):
    """The fields that completions and chat completions share."""

    model: Name | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: (
        Annotated[Text, Field(max_length=MAX_STOP_CHARS)]
        | Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS)]
        | None
    ) = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_unused(cls, data: Any) -> Any:
        return drop_unused(data, UNSUPPORTED, IGNORED)

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for stream=true only", field="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Return the engine's sampling parameters.

        Raises:
            RequestError: a field is out of its range.
        """
        if max_tokens is not None and max_tokens < 1:
            raise RequestError(
                f"max_tokens is {max_tokens}; it must be at least 1", field="max_tokens"
            )
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=() if self.stop is None else self.stop,  # type: ignore[arg-type] # text or list; made a tuple there
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            n=1 if self.n is None else self.n,
            logprobs=logprobs,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


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
    if _are_ids(value):
        return value
    if len(value) > MAX_PROMPTS:
        raise RequestError(
            f"{len(value)} prompts in one request; at most {MAX_PROMPTS} are allowed",
            field="prompt",
        )
    if all(isinstance(item, str) for item in value):
        return [check_text(item) for item in value]
    if all(isinstance(item, list) and item and _are_ids(item) for item in value):
        return value
    raise RequestError(
        "prompt must be text, token ids, or a list of texts or of non-empty lists of token ids",
        field="prompt",
    )


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[Prompt, PlainValidator(parse_prompt, json_schema_input_type=Prompt)]
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def prompts(self) -> Sequence[str | TokenIds]:
        """The prompts as a list, also where the request has a single one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def params(self) -> SamplingParams:
        """Return the engine's sampling parameters.

        Raises:
            RequestError: a field is out of its range, or n times prompts are too many.
        """
        params = self.sampling_params(max_tokens=self.max_tokens, logprobs=self.logprobs)
        if params.n * len(self.prompts) > MAX_SEQUENCES:
            raise RequestError(
                f"{len(self.prompts)} prompts times n={params.n} exceed {MAX_SEQUENCES} sequences",
                field="n",
            )
        return params


class TextPart(_Wire):
    """A piece of a message's content; text is the only type supported."""

    type: Literal["text"]
    text: Text


class Message(_Wire):
    """One message of a conversation; `developer` is OpenAI's newer name of `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None = None
    name: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_unused(cls, data: Any) -> Any:
        return drop_unused(data, _UNSUPPORTED_IN_MESSAGES, frozenset())

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise RequestError(f"a {self.role} message needs content", field="messages")
        return self

    def rendered(self) -> dict[str, str]:
        """Return the message as chat templates know it; parts are joined by line breaks."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: (
        Annotated[
            dict[Name, bool | int | float | Text | None],
            Field(max_length=MAX_TEMPLATE_FIELDS),
        ]
        | None
    ) = None

    def template_fields(self) -> dict[str, Any]:
        """Return further variables for the chat template, such as `enable_thinking`.

        Raises:
            RequestError: a name belongs to the renderer.
        """
        fields = self.chat_template_kwargs or {}
        reserved = sorted(RESERVED_TEMPLATE_FIELDS & fields.keys())
        if reserved or not all(name.isidentifier() for name in fields):
            raise RequestError(
                f"chat_template_kwargs holds names that are reserved or no names: "
                f"{', '.join(reserved or fields)}",
                field="chat_template_kwargs",
            )
        return dict(fields)

    def params(self) -> SamplingParams:
        """Return the engine's sampling parameters.

        Raises:
            RequestError: a field is out of its range or contradicts another.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", field="top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError(
                "max_tokens and max_completion_tokens differ; send one", field="max_tokens"
            )
        return self.sampling_params(
            max_tokens=next(iter(limits), None),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


def drop_unused(data: Any, unsupported: dict[str, tuple[Any, ...]], ignored: frozenset[str]) -> Any:
    """Return a body without ignored fields and without unsupported ones that are not used.

    Raises:
        RequestError: an unsupported field is used.
    """
    if not isinstance(data, dict):
        return data
    for name, unused in unsupported.items():
        if name in data and not any(_same(data[name], value) for value in unused):
            raise RequestError(f"{name} is not supported by this server", field=name)
    return {
        name: value
        for name, value in data.items()
        if name not in ignored and name not in unsupported
    }


def _same(value: Any, unused: Any) -> bool:
    """Compare as JSON does: false is not 0, but 0.0 is."""
    return isinstance(value, bool) == isinstance(unused, bool) and bool(value == unused)


def _are_ids(items: list[Any]) -> bool:
    return set(map(type, items)) == {int}  # one pass without Python code: there may be a million


def _it_is(value: Any) -> str:
    return "" if isinstance(value, list) else f", not {type(value).__name__}"
