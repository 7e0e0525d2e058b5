"""Body of POST /v1/chat/completions: a conversation, and the tools that may be called in it."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from qinfer.engine.beams import BeamParams
from qinfer.engine.params import SamplingParams
from qinfer.errors import RequestError
from qinfer.server.bodies.base import Name, Text, Unused, Wire
from qinfer.server.bodies.generation import GenerationRequest, check_max_tokens
from qinfer.server.bodies.tools import MAX_TOOL_CALLS, MAX_TOOLS, Tool, ToolCall, ToolChoice

MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message
MAX_ALL_PARTS = 8192
MAX_TEMPLATE_FIELDS = 16
# Names that mean something to the renderer itself, not to the template.
RESERVED_TEMPLATE_FIELDS = frozenset(
    {"messages", "conversation", "chat_template", "add_generation_prompt", "tokenize"}
    | {"continue_final_message", "tools", "documents", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)


class Part(Wire):
    """A piece of a message's content."""

    text: Text


class TextPart(Part):
    """Text, the only type of a piece that is supported."""

    type: Literal["text"]


def template_message(role: str, content: str | Sequence[Part]) -> dict[str, Any]:
    """Return a message as chat templates know it; parts are joined by line breaks."""
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    return {"role": "system" if role == "developer" else role, "content": content}


class Message(Wire):
    """One message of a conversation; `developer` is OpenAI's newer name of `system`."""

    unsupported: ClassVar[Unused] = {
        "annotations": (None, []),
        "audio": (None,),
        "function_call": (None,),
        "reasoning_content": (None, ""),
        "refusal": (None, ""),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: Name | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise RequestError(f"a {self.role} message needs content", field="messages")
        if self.tool_calls and self.role != "assistant":
            raise RequestError(f"a {self.role} message has no tool_calls", field="messages")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            needs = "needs the" if self.role == "tool" else "has no"
            raise RequestError(f"a {self.role} message {needs} tool_call_id", field="messages")
        return self

    def rendered(self) -> dict[str, Any]:
        """Return the message as chat templates know it.

        Raises:
            RequestError: the arguments of a call are no JSON object.
        """
        message = template_message(self.role, self.content or "")
        if self.tool_calls:
            message["tool_calls"] = [call.rendered() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
            if self.name is not None:
                message["name"] = self.name
        return message


def check_parts(value: Any) -> Any:
    """Refuse too many parts of messages before each is looked at.

    Raises:
        ValueError: pydantic turns this into an error that names the field.
    """
    messages = value if isinstance(value, list) else []
    contents = [item.get("content") for item in messages if isinstance(item, dict)]
    total = sum(len(content) for content in contents if isinstance(content, list))
    if total > MAX_ALL_PARTS:
        raise ValueError(f"{total} parts in all; at most {MAX_ALL_PARTS} are allowed")
    return value


Messages = Annotated[
    list[Message],
    BeforeValidator(check_parts),
    Field(min_length=1, max_length=MAX_MESSAGES),
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
TemplateFields = Annotated[
    dict[Name, bool | int | float | Text | None], Field(max_length=MAX_TEMPLATE_FIELDS)
]


class Conversation(Wire):
    """What is turned into a prompt by the model's chat template."""

    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateFields | None = None

    @model_validator(mode="after")
    def _check_ending(self) -> Self:
        if self.continue_final_message and "add_generation_prompt" not in self.model_fields_set:
            self.add_generation_prompt = False
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message goes with add_generation_prompt=false: the last message "
                "is continued, so no new one begins",
                field="continue_final_message",
            )
        return self

    def rendered_messages(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates know them.

        A tool's message gets the name of the function whose call it answers, which some templates
        show and OpenAI's clients do not send.

        Raises:
            RequestError: the arguments of a call are no JSON object.
        """
        names: dict[str, str] = {}
        rendered = []
        for message in self.messages:
            names |= {call.id: call.function.name for call in message.tool_calls or ()}
            fields = message.rendered()
            if message.tool_call_id in names:
                fields.setdefault("name", names[message.tool_call_id])
            rendered.append(fields)
        return rendered

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


class ChatRequest(GenerationRequest, Conversation):
    """A conversation to answer."""

    unsupported: ClassVar[Unused] = {**GenerationRequest.unsupported, "best_of": (None, 1)}

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tool_choice(self) -> Self:
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return self
        if not self.tools:
            raise RequestError("tool_choice needs tools to choose from", field="tool_choice")
        names = [tool.function.name for tool in self.tools]
        if not isinstance(choice, str | None) and choice.function.name not in names:
            raise RequestError(
                f"tool_choice names {choice.function.name!r}; the tools are {', '.join(names)}",
                field="tool_choice",
            )
        return self

    def params(self) -> SamplingParams | BeamParams:
        """Return the engine's parameters.

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
        limit = check_max_tokens(next(iter(limits), None))
        if self.use_beam_search:
            return self.beam_params(limit, logprobs=bool(self.logprobs))
        return self.sampling_params(
            max_tokens=limit,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )
