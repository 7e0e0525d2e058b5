"""The FastAPI application: its routes, its layers, its lifespan, and nothing else."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from qinfer import __version__
from qinfer.engine.aio import AsyncEngine
from qinfer.models.tokenizer import Tokenizer
from qinfer.server.bodies.chat import ChatRequest
from qinfer.server.bodies.completions import CompletionRequest
from qinfer.server.bodies.responses_api import ResponsesRequest
from qinfer.server.bodies.tokens import DetokenizeRequest, TokenizeRequest
from qinfer.server.chat import chat
from qinfer.server.completions import complete
from qinfer.server.errors import install_error_handlers
from qinfer.server.generation import unless_disconnected
from qinfer.server.limits import BodyLimit
from qinfer.server.observer import CLIENT_CLOSED_REQUEST, record_of
from qinfer.server.openapi import document
from qinfer.server.operations import add_operations
from qinfer.server.page import add_page
from qinfer.server.reading import read_body
from qinfer.server.request_ids import RequestIds
from qinfer.server.response_object import ResponseObject
from qinfer.server.responses import (
    ChatResponse,
    CompletionResponse,
    DetokenizeResponse,
    Health,
    ModelCard,
    ModelList,
    TokenizeResponse,
)
from qinfer.server.responses_api import respond
from qinfer.server.service import ServerSettings, Service
from qinfer.server.tokenization import detokenize, tokenize
from qinfer.server.unsupported import add_unsupported_routes

_EVENT: Final = {
    "description": "One server-sent event.",
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/event-stream": {"schema": _EVENT}}}
}


@dataclass(frozen=True, slots=True)
class Post:
    """A route that takes a body.

    Args:
        path: of the route.
        body: what it takes.
        answer: what it answers.
        handler: does the work; gets the body, the service and the request's record.
        summary: for the OpenAPI document.
        streams: answers with events if asked for.
    """

    path: str
    body: type[BaseModel]
    answer: type[BaseModel]
    handler: Callable[..., Awaitable[Response]]
    summary: str
    streams: bool = False


POSTS: Final = (
    Post(
        "/v1/completions",
        CompletionRequest,
        CompletionResponse,
        complete,
        "Continue text or token ids; a stream of chunks with `stream`.",
        streams=True,
    ),
    Post(
        "/v1/chat/completions",
        ChatRequest,
        ChatResponse,
        chat,
        "Continue a conversation; a stream of chunks with `stream`.",
        streams=True,
    ),
    Post(
        "/v1/responses",
        ResponsesRequest,
        ResponseObject,
        respond,
        "Answer text or messages; a stream of typed events with `stream`.",
        streams=True,
    ),
    Post("/tokenize", TokenizeRequest, TokenizeResponse, tokenize, "Return token ids of text."),
    Post(
        "/detokenize",
        DetokenizeRequest,
        DetokenizeResponse,
        detokenize,
        "Return text of token ids.",
    ),
)


class Application(FastAPI):
    """FastAPI with a document that is true, and no page that loads anything from elsewhere."""

    def __init__(
        self, *, bodies: Mapping[str, type[BaseModel]], needs_key: bool, **options: Any
    ) -> None:
        super().__init__(docs_url=None, redoc_url=None, redirect_slashes=False, **options)
        self._bodies = bodies
        self._needs_key = needs_key

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        if self.openapi_schema is None:
            self.openapi_schema = document(self, self._bodies, needs_key=self._needs_key)
        return self.openapi_schema


def create_app(engine: AsyncEngine, tokenizer: Tokenizer, settings: ServerSettings) -> FastAPI:
    """Return the application that serves one engine.

    Args:
        engine: started and stopped with the application.
        tokenizer: the model's.
        settings: names and limits.
    """
    service = Service(engine, tokenizer, settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.stop()
            service.close()

    app = Application(
        bodies={post.path: post.body for post in POSTS},
        needs_key=settings.operations.keys is not None,
        title="qinfer",
        version=__version__,
        description="OpenAI-compatible API over a quantized model.",
        lifespan=lifespan,
    )
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    install_error_handlers(app)
    _add_model_routes(app, service)
    for post in POSTS:
        _add_post(app, post, service)
    add_page(app)
    app.state.lifecycle = add_operations(app, service)
    add_unsupported_routes(app)
    app.add_middleware(RequestIds)  # the last one added is the first to see a request
    return app


def _add_model_routes(app: FastAPI, service: Service) -> None:
    cards = [
        ModelCard(id=name, created=service.started, max_model_len=service.settings.max_model_len)
        for name in service.settings.served_model_names
    ]

    @app.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health() -> Response:
        """Tell whether the engine is alive: 200, or 503 with the reason."""
        reason = service.engine.failure
        if reason is None and not service.engine.healthy:
            reason = "the engine is not running"
        status = Health(status="ok" if reason is None else "failed", reason=reason)
        return JSONResponse(status.model_dump(), status_code=200 if reason is None else 503)

    @app.get("/v1/models")
    async def models() -> ModelList:
        """List the served names, with the tokens that one request may use."""
        return ModelList(data=cards)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        """Return one served name."""
        service.check_model(name)
        return next(card for card in cards if card.id == name)


def _add_post(app: FastAPI, post: Post, service: Service) -> None:
    async def endpoint(request: Request) -> Response:
        body = await read_body(request, post.body, service)
        work = post.handler(body, service, record_of(request.scope))
        return await unless_disconnected(request, work)

    app.add_api_route(
        post.path,
        endpoint,
        methods=["POST"],
        name=post.handler.__name__,
        summary=post.summary,
        response_model=post.answer,
        responses=_STREAM if post.streams else None,
    )


async def _client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
