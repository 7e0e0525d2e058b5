"""From the bytes of a request to a validated body, without holding up the event loop.

Small bodies are parsed where they are: that takes a few milliseconds at most. Larger ones go to
the encoding thread, in pieces between which other threads run (`json_pieces`). Every error names
the field that is to blame.
"""

import json
from typing import Any, Final, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from qinfer.errors import RequestError
from qinfer.server import json_pieces
from qinfer.server.service import Service

SMALL_BODY: Final = 32 * 1024  # bytes
_MAX_VALIDATION_ERRORS: Final = 3  # of one body; a union reports one per alternative
_MAX_SHOWN_NAME: Final = 64  # characters of an unknown field's name
_TYPES: Final = frozenset({"bool", "dict", "float", "int", "str"})

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, model: type[Body], service: Service) -> Body:
    """Return the validated body of a request.

    Raises:
        RequestError: it is no JSON, or not what `model` allows; `field` says where.
        ClientDisconnect: the client went away before all of it had come.
    """
    data = await request.body()
    check_content_type(request)
    if len(data) <= SMALL_BODY:
        return parse(data, model)
    return await service.in_thread(lambda: parse(data, model))


def check_content_type(request: Request) -> None:
    """Refuse what is not declared to be JSON.

    A page of another site can make a browser send any other type without asking this server
    first, but not JSON.

    Raises:
        RequestError: the header is missing or names another type.
    """
    declared = request.headers.get("content-type", "")
    kind = declared.partition(";")[0].strip().lower()
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise RequestError(
            "the body must be JSON; send it with the header Content-Type: application/json"
        )


def parse(data: bytes, model: type[Body]) -> Body:
    """Return a body from its bytes.

    Raises:
        RequestError: see `read_body`.
    """
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text) if len(data) <= SMALL_BODY else json_pieces.loads(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos}"
        raise RequestError(f"the body is not valid JSON: {reason}") from error
    except RecursionError as error:
        raise RequestError("the body is not valid JSON: nested too deeply") from error
    except ValueError as error:  # not UTF-8, or a number of thousands of digits
        raise RequestError(f"the body is not valid JSON: {_first_line(error)}") from error
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> RequestError:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    messages = list(dict.fromkeys(_describe(dict(item)) for item in errors))
    return RequestError(
        "; ".join(messages[:_MAX_VALIDATION_ERRORS]), field=field_path(errors[0]["loc"])
    )


def field_path(loc: tuple[int | str, ...]) -> str | None:
    """Return the dotted path of an offending field, without the names of union alternatives.

    These are no identifiers, names of classes, or of built-in types; fields are in lower case.
    """
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _is_field(part):
            path += f".{part}" if path else part
    return path or None


def _is_field(part: str) -> bool:
    return part.isidentifier() and part[0].islower() and part not in _TYPES and _is_short(part)


def _is_short(name: str) -> bool:
    return len(name) <= _MAX_SHOWN_NAME


def _describe(item: dict[str, Any]) -> str:
    field = field_path(item["loc"])
    if item["type"] == "extra_forbidden":
        name = str(item["loc"][-1])
        shown = name if _is_short(name) else f"{name[:_MAX_SHOWN_NAME]}…"
        return f"unknown field {field or shown!r}"
    return f"{field}: {item['msg']}" if field else f"body: {item['msg']}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
