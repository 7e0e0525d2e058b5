"""From exceptions to HTTP: one table of statuses and OpenAI's error body for all of them."""

from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from qinfer.errors import (
    CapacityError,
    ContextLengthError,
    NonFiniteError,
    OverloadedError,
    QinferError,
    RequestError,
)

CLIENT_ERROR: Final = "invalid_request_error"
SERVER_ERROR: Final = "server_error"
RETRY_AFTER_SECONDS: Final = 1


class ErrorDetail(BaseModel):
    """What went wrong: in words, whose fault it is, the field to blame, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every error, as OpenAI's clients expect it."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How a class of errors looks over HTTP.

    Args:
        status: the HTTP status.
        type: OpenAI's `type`: whose fault it is.
        code: OpenAI's `code`, for programs; None = the message is all there is.
    """

    status: int
    type: str
    code: str | None = None


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""


class UnsupportedRouteError(QinferError):
    """A route of OpenAI's that this server knows, but does not serve."""


class GenerationError(QinferError):
    """A request that the engine ended with an error, such as non-finite logits."""


class UnavailableError(QinferError):
    """The server cannot answer any more: it is stopping, or its engine has failed."""


# The first class that matches decides, so subclasses stand before their parents.
ERROR_KINDS: tuple[tuple[type[Exception], ErrorKind], ...] = (
    (ContextLengthError, ErrorKind(400, CLIENT_ERROR, "context_length_exceeded")),
    (ModelNotFoundError, ErrorKind(404, CLIENT_ERROR, "model_not_found")),
    (RequestError, ErrorKind(400, CLIENT_ERROR)),
    (UnsupportedRouteError, ErrorKind(501, CLIENT_ERROR, "not_supported")),
    (UnavailableError, ErrorKind(503, SERVER_ERROR, "unavailable")),
    (OverloadedError, ErrorKind(429, "rate_limit_error", "overloaded")),
    # What could never run, however long it waited: the message says which limit to change.
    (CapacityError, ErrorKind(400, CLIENT_ERROR, "capacity_exceeded")),
    (NonFiniteError, ErrorKind(500, SERVER_ERROR, "non_finite")),
    (QinferError, ErrorKind(500, SERVER_ERROR, "engine_error")),
    (Exception, ErrorKind(500, SERVER_ERROR, "internal_error")),
)

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 408: "timeout", 413: "body_too_large"}


def error_kind(error: Exception) -> ErrorKind:
    """Return how `error` looks over HTTP."""
    return next(kind for cls, kind in ERROR_KINDS if isinstance(error, cls))


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's error object; what a client sent may be quoted in it, whatever it was."""
    message = message.encode(errors="backslashreplace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: Exception) -> dict[str, Any]:
    """Return OpenAI's error object for an exception.

    What an unexpected exception says stays in the server's log; a client learns only that it
    happened.
    """
    kind = error_kind(error)
    message = str(error) if isinstance(error, QinferError) else "internal error; see the log"
    param = error.field if isinstance(error, RequestError) else None
    return error_body(message, kind=kind.type, param=param, code=kind.code)


def error_response(error: Exception) -> JSONResponse:
    """Return the HTTP response for an exception."""
    status = error_kind(error).status
    headers = None
    if status in (429, 503):
        seconds = error.retry_after if isinstance(error, OverloadedError) else RETRY_AFTER_SECONDS
        headers = {"Retry-After": str(seconds)}
    return JSONResponse(body_of(error), status_code=status, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of the application, of routing and of validation OpenAI-shaped."""
    app.add_exception_handler(QinferError, _on_error)
    app.add_exception_handler(Exception, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)


async def _on_error(_request: Request, error: Exception) -> JSONResponse:
    return error_response(error)


async def _on_http_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = CLIENT_ERROR if error.status_code < 500 else SERVER_ERROR
    body = error_body(str(error.detail), kind=kind, code=_HTTP_CODES.get(error.status_code))
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_validation_error(_request: Request, error: Exception) -> JSONResponse:
    """Answer for parameters of the address; bodies are read elsewhere."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    message = f"{name}: {first['msg']}"
    return JSONResponse(error_body(message, kind=CLIENT_ERROR, param=name), status_code=400)
