"""What a request's tools come to: what the template shows, what the output is, who reads it."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from qinfer.engine.beams import BeamParams
from qinfer.engine.params import SamplingParams, StructuredOutput
from qinfer.errors import RequestError
from qinfer.server.bodies.chat import ChatRequest
from qinfer.server.bodies.structured import constraint
from qinfer.server.bodies.tools import NO_PARAMETERS, Tool
from qinfer.server.tool_calls import (
    MISTRAL,
    PLAIN_JSON,
    CallParser,
    Family,
    FamilyParser,
    ForcedCall,
)

_DEFINITIONS = ("$defs", "definitions")
_MISTRAL_ID_CHARS = 9  # its templates refuse others


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the tools of one request are used.

    Args:
        rendered: for the chat template; None = no tools.
        structured: what the output must be, so that it is a call; None = anything.
        parser: makes a reader of one choice's text; None = all of it is text.
        special: calls are marked by special tokens, so these must stay in the text.
        forced: one function must be called; OpenAI's answers then end with `stop`.
        short_ids: ids of calls have Mistral's form.
    """

    rendered: list[dict[str, Any]] | None = None
    structured: StructuredOutput | None = None
    parser: Callable[[], CallParser] | None = None
    special: bool = False
    forced: bool = False
    short_ids: bool = False

    def apply(self, params: SamplingParams | BeamParams) -> SamplingParams | BeamParams:
        """Return parameters under which the calls can be read.

        Raises:
            RequestError: a call is demanded of a beam search.
        """
        if self.structured is not None:
            if isinstance(params, BeamParams):
                raise RequestError(
                    "a tool_choice that demands a call does not go with use_beam_search",
                    field="tool_choice",
                )
            return replace(params, structured=self.structured)
        return replace(params, skip_special_tokens=False) if self.special else params

    def new_id(self) -> str:
        """Return an id for a call."""
        if self.short_ids:
            return uuid.uuid4().hex[:_MISTRAL_ID_CHARS]
        return f"call_{uuid.uuid4().hex[:24]}"


def tool_use(body: ChatRequest, family: Family, *, template_shows_tools: bool) -> ToolUse:
    """Return how the tools of a request are used.

    Args:
        body: the request.
        family: how the model's template spells calls.
        template_shows_tools: whether the template tells the model about tools at all.

    Raises:
        RequestError: the template has no place for tools, or the output must be two things.
    """
    choice = body.tool_choice
    if not body.tools or choice == "none":
        return ToolUse()
    if not template_shows_tools:
        raise RequestError(
            "this model's chat template has no place for tools, so the model cannot know of them; "
            "send none, or serve with a template that has (--chat-template FILE)",
            field="tools",
        )
    rendered = [tool.rendered() for tool in body.tools]
    use = ToolUse(rendered, short_ids=family is MISTRAL)
    wanted = body.structured()
    if choice in (None, "auto"):
        if wanted is not None:
            return use  # the output is what was asked for, so it cannot be a call
        names = frozenset(tool.function.name for tool in body.tools)
        return replace(
            use,
            parser=lambda: FamilyParser(family, names, max_calls=_max_calls(body)),
            special=family.special,
        )
    if wanted is not None:
        raise RequestError(
            "tool_choice demands a call, so the output cannot follow another structure too",
            field="tool_choice",
        )
    return _demanded(body, use)


def _demanded(body: ChatRequest, use: ToolUse) -> ToolUse:
    """Return how a call is made certain: the output must be its JSON."""
    tools, choice = body.tools or [], body.tool_choice
    if choice == "required" or choice is None or isinstance(choice, str):
        names = frozenset(tool.function.name for tool in tools)
        schema = calls_schema(tools, max_calls=_max_calls(body))
        return replace(
            use,
            structured=constraint("tools", {"json": schema}),
            parser=lambda: FamilyParser(PLAIN_JSON, names),
        )
    name = choice.function.name
    function = next(tool.function for tool in tools if tool.function.name == name)
    return replace(
        use,
        structured=constraint("tools", {"json": function.parameters or NO_PARAMETERS}),
        parser=lambda: ForcedCall(name),
        forced=True,
    )


def calls_schema(tools: list[Tool], *, max_calls: int | None) -> dict[str, Any]:
    """Return the JSON schema of a list of calls: `[{"name": ..., "parameters": {...}}]`.

    Definitions inside the tools' schemas move to the root, where their references point.

    Raises:
        RequestError: two tools define different things under one name.
    """
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool.function.parameters or NO_PARAMETERS)
        for key in _DEFINITIONS:
            for name, defined in (parameters.pop(key, None) or {}).items():
                if definitions.setdefault(key, {}).setdefault(name, defined) != defined:
                    raise RequestError(
                        f"two tools define {key}/{name} differently; rename one", field="tools"
                    )
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [tool.function.name]},
                    "parameters": parameters,
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items} | definitions
    if max_calls is not None:
        schema["maxItems"] = max_calls
    return schema


def _max_calls(body: ChatRequest) -> int | None:
    return 1 if body.parallel_tool_calls is False else None
