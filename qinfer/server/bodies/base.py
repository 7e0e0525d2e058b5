"""The base of all request bodies, and the kinds of values that they share.

Policy for fields: what a body lists is honoured; its `ignored` fields carry no meaning for the
answer and are dropped; its `unsupported` fields change the answer and are accepted only at a value
that means "not used"; every other field is refused by name, as OpenAI does. Values are strict: a
number is not taken from text.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from qinfer.errors import RequestError

MAX_FIELDS = 128  # of one object; the largest body has half as many
MAX_NAME_CHARS = 256
MAX_JSON_CHARS = 64 * 1024  # of a JSON schema or a call's arguments
MAX_JSON_DEPTH = 64

Unused = Mapping[str, tuple[Any, ...]]


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


def check_json(value: Any) -> Any:
    """Refuse JSON that is nested too deeply, too long, or that could not be written again.

    Raises:
        ValueError: pydantic turns this into an error that names the field.
    """
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [inner for outer in level for inner in _items(outer)]
        if not level:
            break
    else:
        raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(text) > MAX_JSON_CHARS:
        raise ValueError(f"{len(text)} characters of JSON; at most {MAX_JSON_CHARS} are allowed")
    check_text(text)
    return value


Text = Annotated[str, AfterValidator(check_text)]
Name = Annotated[Text, Field(max_length=MAX_NAME_CHARS)]
JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]
TokenIds = list[int]


def _describe_dropped(schema: dict[str, Any], cls: type[BaseModel]) -> None:
    """Add the fields that are dropped to a body's JSON schema, with the values they may have."""
    if not issubclass(cls, Wire):
        return
    properties = schema.setdefault("properties", {})
    for name in sorted(cls.ignored):
        properties[name] = {"description": "Accepted, without a meaning for the answer."}
    for name, values in sorted(cls.unsupported.items()):
        properties[name] = {"description": "Not supported.", "enum": list(values)}


class Wire(BaseModel):
    """Base of the request bodies: strict values, no unknown fields, no NaN."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, json_schema_extra=_describe_dropped
    )
    ignored: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[Unused] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_unused(cls, data: Any) -> Any:
        return drop_unused(data, cls.unsupported, cls.ignored)


def drop_unused(data: Any, unsupported: Unused, ignored: frozenset[str]) -> Any:
    """Return a body without ignored fields and without unsupported ones that are not used.

    Raises:
        RequestError: an unsupported field is used.
        ValueError: there are more fields than any body has.
    """
    if not isinstance(data, dict):
        return data
    if len(data) > MAX_FIELDS:
        raise ValueError(f"{len(data)} fields; at most {MAX_FIELDS} are allowed")
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


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
