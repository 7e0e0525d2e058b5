"""The FastAPI application: its routes, its lifespan, and nothing else."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from qinfer import __version__
from qinfer.engine.aio import AsyncEngine
from qinfer.models.tokenizer import Tokenizer
from qinfer.server.chat import chat
from qinfer.server.completions import complete
from qinfer.server.errors import install_error_handlers
from qinfer.server.limits import BodyLimit
from qinfer.server.operations import add_operations
from qinfer.server.page import add_page
from qinfer.server.responses import (
    ChatResponse,
    CompletionResponse,
    Health,
    ModelCard,
    ModelList,
)
from qinfer.server.service import ServerSettings, Service
from qinfer.server.wire import ChatRequest, CompletionRequest

CLIENT_CLOSED_REQUEST = 499  # nginx's status; only logs see it, for the client is gone


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

    app = FastAPI(
        title="qinfer",
        version=__version__,
        description="OpenAI-compatible API over a quantized model.",
        lifespan=lifespan,
    )
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    install_error_handlers(app)
    _add_model_routes(app, service)
    _add_generation_routes(app, service)
    add_page(app)
    app.state.lifecycle = add_operations(app, service)
    return app


def _add_model_routes(app: FastAPI, service: Service) -> None:
    cards = [
        ModelCard(id=name, created=service.started, max_model_len=service.settings.max_model_len)
        for name in service.settings.served_model_names
    ]

    @app.get("/health")
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


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=CompletionResponse)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue text or token ids; a stream of chunks with `stream`."""
        return await complete(body, request, service)

    @app.post("/v1/chat/completions", response_model=ChatResponse)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Continue a conversation; a stream of chunks with `stream`."""
        return await chat(body, request, service)


async def _client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
