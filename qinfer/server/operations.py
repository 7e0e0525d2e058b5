"""What operators ask for, and the layers between the socket and the routes.

Routes: `/health` (alive), `/ready` (send requests here), `/version`, `/metrics` (Prometheus) and
`/v1/qinfer/stats` (the live view's data). Layers, from the outside: records and logs, CORS, API
keys, the gate for work, the limits of bodies (added by the application).
"""

import time
from typing import Any, Final

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware

from qinfer import __version__
from qinfer.server.auth import RequireKey
from qinfer.server.lifecycle import Gate, Lifecycle
from qinfer.server.metrics import make_registry
from qinfer.server.observer import HttpCounts, Observer
from qinfer.server.request_ids import HEADER
from qinfer.server.service import Service
from qinfer.server.stats import Stats, live_stats

RETRY_SECONDS: Final = "5"


def add_operations(app: FastAPI, service: Service) -> Lifecycle:
    """Add the operators' routes and layers to an application.

    To be called after every other layer was added, so that these stand before them.

    Returns:
        The server's state, through which whoever runs it stops it.
    """
    settings = service.settings.operations
    lifecycle = Lifecycle(service.engine)
    http = HttpCounts()
    registry = make_registry(service.name, lifecycle, http, settings)
    _add_state_routes(app, lifecycle)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        """Return everything countable as Prometheus text."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/qinfer/stats")
    async def stats() -> Stats:
        """Return what the live view shows."""
        return live_stats(service, lifecycle)

    app.add_middleware(Gate, lifecycle=lifecycle, max_requests=settings.max_concurrent_requests)
    if settings.keys is not None:
        app.add_middleware(RequireKey, keys=settings.keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[HEADER, "Retry-After"],
            # Keys travel in a header that the page sets itself; cookies are never needed, and
            # without them a wildcard origin gives nobody's rights away.
            allow_credentials=False,
        )
    app.add_middleware(
        Observer,
        counts=http,
        log=settings.request_log,
        audit=settings.audit_log,
        log_bodies=settings.log_prompts,
    )
    return lifecycle


def _add_state_routes(app: FastAPI, lifecycle: Lifecycle) -> None:
    @app.get("/ready")
    async def ready() -> Response:
        """Tell whether to send requests here: 200, or 503 while loading, draining or failed."""
        state, reason = lifecycle.state, lifecycle.reason
        body: dict[str, Any] = {"status": state, "reason": reason}
        if state == "ready":
            return JSONResponse(body)
        return JSONResponse(body, status_code=503, headers={"Retry-After": RETRY_SECONDS})

    @app.get("/version")
    async def version() -> dict[str, Any]:
        """Return the version, and for how many seconds the server has been up."""
        return {"version": __version__, "uptime": round(time.monotonic() - lifecycle.born, 3)}
