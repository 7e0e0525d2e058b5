"""Body of POST /v1/responses: text in, text out; what it cannot do is refused by name."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from qinfer.engine.params import SamplingParams, StructuredOutput
from qinfer.server.bodies.base import JsonObject, Name, Text, Unused, Wire
from qinfer.server.bodies.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    Part,
    check_parts,
    template_message,
)
from qinfer.server.bodies.generation import check_max_tokens
from qinfer.server.bodies.structured import (
    JsonSchema,
    ResponseFormat,
    constraint,
    format_constraint,
)

MAX_METADATA = 16


class InputText(Part):
    """A piece of a message: the user's, or of an earlier answer of the model."""

    ignored: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs"})

    type: Literal["input_text", "output_text", "text"]


class InputMessage(Wire):
    """A message; earlier answers may be sent back as they came."""

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[InputText], Field(max_length=MAX_PARTS)]

    def rendered(self) -> dict[str, Any]:
        """Return the message as chat templates know it."""
        return template_message(self.role, self.content)


class TextFormat(Wire):
    """What the text must be: the fields of `response_format`, without its wrapping."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    description: Text | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Wire):
    """Options of the text."""

    unsupported: ClassVar[Unused] = {"verbosity": (None, "medium")}

    format: TextFormat | None = None


class ResponsesStreamOptions(Wire):
    """Options of a streamed answer."""

    include_obfuscation: bool | None = None  # padding against traffic analysis; never added


class ResponsesRequest(Wire):
    """Text or messages to answer."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {"prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"}
        | {"store", "user", "parallel_tool_calls"}
    )
    unsupported: ClassVar[Unused] = {
        "background": (None, False),
        "context_management": (None, []),
        "conversation": (None,),
        "include": (None, []),
        "max_tool_calls": (None,),
        "previous_response_id": (None,),
        "prompt": (None,),
        "reasoning": (None,),
        "tool_choice": (None, "none", "auto"),
        "tools": (None, []),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    }

    model: Name | None = None
    input: (
        Text
        | Annotated[
            list[InputMessage],
            BeforeValidator(check_parts),
            Field(min_length=1, max_length=MAX_MESSAGES),
        ]
    )
    instructions: Text | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: Annotated[dict[Name, Text], Field(max_length=MAX_METADATA)] | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation as chat templates know it, the instructions first."""
        messages = (
            [{"role": "user", "content": self.input}]
            if isinstance(self.input, str)
            else [message.rendered() for message in self.input]
        )
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        return messages

    def structured(self) -> StructuredOutput | None:
        """Return what the text must look like; None = anything.

        Raises:
            RequestError: the format contradicts itself.
        """
        wanted = None if self.text is None else self.text.format
        if wanted is None:
            return None
        schema = None
        if wanted.schema_ is not None or wanted.type == "json_schema":
            schema = JsonSchema(name=wanted.name or "answer", schema=wanted.schema_)
        kind = format_constraint(ResponseFormat(type=wanted.type, json_schema=schema))
        return None if kind is None else constraint("text", kind)

    def params(self) -> SamplingParams:
        """Return the engine's sampling parameters.

        Raises:
            RequestError: a field is out of its range.
        """
        limit = check_max_tokens(self.max_output_tokens, "max_output_tokens")
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=limit,
            structured=self.structured(),
        )
