"""OpenAI's other routes: known, not served, and refused in words instead of a bare 404."""

from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qinfer.server.errors import UnsupportedRouteError

SUPPORTED: Final = (
    "POST /v1/chat/completions, /v1/completions, /v1/responses, /tokenize and /detokenize, "
    "GET /v1/models"
)
_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")
# prefix -> what there is not
_FAMILIES: Final = {
    "/v1/assistants": "assistants are",
    "/v1/audio": "audio is",
    "/v1/batches": "batches are",
    "/v1/conversations": "conversations are",
    "/v1/embeddings": "embeddings are",
    "/v1/files": "files are",
    "/v1/fine_tuning": "fine-tuning is",
    "/v1/images": "images are",
    "/v1/moderations": "moderations are",
    "/v1/realtime": "realtime sessions are",
    "/v1/rerank": "reranking is",
    "/v1/score": "scoring is",
    "/v1/threads": "threads are",
    "/v1/uploads": "uploads are",
    "/v1/vector_stores": "vector stores are",
    "/v1/videos": "videos are",
    "/v1/responses/": "responses are not stored, so fetching, cancelling and deleting them is",
    "/v1/chat/completions/": "chat completions are not stored, so fetching them is",
}


def add_unsupported_routes(app: FastAPI) -> None:
    """Add routes that answer 501, after all routes that do something."""
    for prefix, what in _FAMILIES.items():
        paths = (
            [prefix + "{rest:path}"]
            if prefix.endswith("/")
            else [prefix, f"{prefix}/{{rest:path}}"]
        )
        for path in paths:
            app.router.routes.append(
                Route(path, _refusal(what), methods=_METHODS, include_in_schema=False)
            )


def _refusal(what: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(_request: Request) -> Response:
        raise UnsupportedRouteError(
            f"{what} not supported by this server, which generates text: {SUPPORTED}"
        )

    return refuse
