"""The ways in which clients ask for structured output: OpenAI's `response_format` and vLLM's own.

All of them end as one `StructuredOutput`; asking in two ways at once is refused.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from qinfer.engine.params import MAX_CHOICES, MAX_STRUCTURE_CHARS, StructuredOutput
from qinfer.errors import RequestError
from qinfer.server.bodies.base import JsonObject, Name, Text, Wire

SchemaText = Annotated[Text, Field(max_length=MAX_STRUCTURE_CHARS)]
Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]


class JsonSchema(Wire):
    """OpenAI's wrapping of a JSON schema. The schema is followed whether `strict` or not."""

    name: Name
    description: Text | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    """What the answer is: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Wire):
    """vLLM's `structured_outputs`; exactly one field is given."""

    json_: JsonObject | SchemaText | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: SchemaText | None = None
    choice: Choices | None = None
    grammar: SchemaText | None = None


class StructureFields(Wire):
    """The fields of a request that ask for structured output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | SchemaText | None = None
    guided_regex: SchemaText | None = None
    guided_choice: Choices | None = None
    guided_grammar: SchemaText | None = None

    def structured(self) -> StructuredOutput | None:
        """Return what the output must look like; None = anything.

        Raises:
            RequestError: asked for in more than one way, or no constraint at all.
        """
        asked = self._asked()
        if not asked:
            return None
        if len(asked) > 1:
            raise RequestError(
                f"structured output is asked for by {' and by '.join(asked)}; send one of them",
                field=next(iter(asked)),
            )
        ((name, wanted),) = asked.items()
        return constraint(name, wanted)

    @property
    def structure_field(self) -> str | None:
        """The field that asks for structured output."""
        return next(iter(self._asked()), None)

    def _asked(self) -> dict[str, dict[str, Any]]:
        """Return the fields of a `StructuredOutput` that are asked for, by the field that does."""
        asked = {
            "response_format": format_constraint(self.response_format),
            "structured_outputs": self._structured_outputs(),
            "guided_json": _given(json=self.guided_json),
            "guided_regex": _given(regex=self.guided_regex),
            "guided_choice": _given(choice=self.guided_choice),
            "guided_grammar": _given(grammar=self.guided_grammar),
        }
        return {name: wanted for name, wanted in asked.items() if wanted}

    def _structured_outputs(self) -> dict[str, Any] | None:
        given = self.structured_outputs
        if given is None:
            return None
        wanted = _given(
            json=given.json_, regex=given.regex, choice=given.choice, grammar=given.grammar
        )
        if given.json_object and wanted:
            raise RequestError(
                f"structured_outputs takes one of json_object and {next(iter(wanted))}",
                field="structured_outputs",
            )
        return {"json": {"type": "object"}} if given.json_object else wanted or {"json": None}


def format_constraint(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the fields of a `StructuredOutput` that a response format means; None = text.

    Raises:
        RequestError: a schema is missing, or there is one without the type `json_schema`.
    """
    if wanted is None:
        return None
    if (wanted.json_schema is not None) != (wanted.type == "json_schema"):
        raise RequestError(
            "response_format needs json_schema if, and only if, its type is json_schema",
            field="response_format",
        )
    if wanted.json_schema is not None:
        return {"json": wanted.json_schema.schema_ or {}}
    return {"json": {"type": "object"}} if wanted.type == "json_object" else None


def constraint(field: str, wanted: dict[str, Any]) -> StructuredOutput:
    """Return a constraint, its errors told about the request's field.

    Raises:
        RequestError: not exactly one kind, or one that is too long.
    """
    if "choice" in wanted:
        wanted = wanted | {"choice": tuple(wanted["choice"])}
    if isinstance(wanted.get("json"), str):
        _check_schema_text(field, wanted["json"])
    try:
        return StructuredOutput(**wanted)
    except RequestError as error:
        raise RequestError(f"{field}: {error}", field=field) from error


def _check_schema_text(field: str, text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} is no JSON schema: {error}", field=field) from error
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{field} is no JSON schema but {text[:40]}", field=field)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
