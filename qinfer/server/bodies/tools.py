"""Tools as clients describe them, and the calls that they send back in the history."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from qinfer.errors import RequestError
from qinfer.server.bodies.base import MAX_JSON_CHARS, JsonObject, Name, Text, Wire, check_json

MAX_TOOLS = 128
MAX_TOOL_CALLS = 128  # of one message
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Wire):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Wire):
    """A tool; functions are the only kind supported."""

    type: Literal["function"]
    function: Function

    def rendered(self) -> dict[str, Any]:
        """Return the tool as chat templates know it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or NO_PARAMETERS
        return {"type": "function", "function": function}


class FunctionChoice(Wire):
    """The name of the function that must be called."""

    name: FunctionName


class NamedToolChoice(Wire):
    """Exactly this function must be called."""

    type: Literal["function"]
    function: FunctionChoice


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class FunctionCall(Wire):
    """A call that the model made: the arguments are JSON text."""

    name: FunctionName
    arguments: Annotated[Text, Field(max_length=MAX_JSON_CHARS)]


class ToolCall(Wire):
    """A call in an assistant message of the history."""

    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall

    def rendered(self) -> dict[str, Any]:
        """Return the call as chat templates know it: with the arguments as an object.

        Raises:
            RequestError: the arguments are no JSON object.
        """
        try:
            arguments = check_json(json.loads(self.function.arguments or "{}"))
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"the arguments of the call {self.id!r} are no JSON: {error}", field="messages"
            ) from error
        if not isinstance(arguments, dict):
            raise RequestError(
                f"the arguments of the call {self.id!r} are no JSON object", field="messages"
            )
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}
