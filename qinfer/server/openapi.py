"""The OpenAPI document: what FastAPI derives from the routes, made true.

Bodies are read by this package (`reading`), so their schemas are added here; errors have OpenAI's
shape instead of FastAPI's; and every status that a route can answer with is listed.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from qinfer.server.auth import OPEN_PATHS
from qinfer.server.errors import ErrorResponse
from qinfer.server.request_ids import HEADER

_REF: Final = "#/components/schemas/{model}"
_COMMON: Final = (401, 429, 500, 503)  # no key, too much, broken, stopping
_OF_BODIES: Final = (400, 404, 408, 413)  # invalid, other model, too slow, too large
_OF_MODELS: Final = (404,)
_HEADERS: Final = {
    HEADER: {
        "description": "The request's id: the client's own, or one that the server made.",
        "schema": {"type": "string"},
    }
}
_METHODS: Final = ("get", "post")


def document(
    app: FastAPI, bodies: Mapping[str, type[BaseModel]], *, needs_key: bool
) -> dict[str, Any]:
    """Return the OpenAPI document of an application.

    Args:
        app: all of its routes are there.
        bodies: by path, the bodies that are read by `reading`.
        needs_key: whether an API key is asked for.
    """
    result = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    schemas = result.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _add_schemas(schemas, [ErrorResponse], "serialization")
    _add_schemas(schemas, list(dict.fromkeys(bodies.values())), "validation")
    if needs_key:
        schemes = result["components"].setdefault("securitySchemes", {})
        schemes["key"] = {"type": "http", "scheme": "bearer"}
    for path, operations in result["paths"].items():
        for method in operations.keys() & set(_METHODS):
            _complete(operations[method], path, bodies.get(path), needs_key=needs_key)
    return result


def _complete(
    operation: dict[str, Any], path: str, body: type[BaseModel] | None, *, needs_key: bool
) -> None:
    responses = operation.setdefault("responses", {})
    responses.pop("422", None)
    statuses = set(_COMMON)
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference(body.__name__)}},
        }
        statuses |= set(_OF_BODIES)
    elif "{" in path:
        statuses |= set(_OF_MODELS)
    if not needs_key:
        statuses.discard(401)
    for status in sorted(statuses):
        responses.setdefault(
            str(status),
            {
                "description": HTTPStatus(status).phrase,
                "content": {"application/json": {"schema": _reference(ErrorResponse.__name__)}},
            },
        )
    for response in responses.values():
        response["headers"] = response.get("headers", {}) | _HEADERS
    if needs_key and path not in OPEN_PATHS:
        operation["security"] = [{"key": []}]


def _add_schemas(schemas: dict[str, Any], models: list[type[BaseModel]], mode: Any) -> None:
    _, found = models_json_schema([(model, mode) for model in models], ref_template=_REF)
    schemas |= found.get("$defs", {})


def _reference(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(model=name)}
