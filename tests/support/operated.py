"""An application over the real asynchronous engine and a model made of arithmetic."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from support.fake_engine import make_core

from qinfer.engine.aio import AsyncEngine
from qinfer.server.app import create_app
from qinfer.server.service import ServerSettings
from qinfer.server.settings import OperationSettings

COMPLETIONS = "/v1/completions"


class Operated:
    """The application and what it is made of."""

    def __init__(self, app: FastAPI, engine: AsyncEngine, http: httpx.AsyncClient) -> None:
        self.app = app
        self.engine = engine
        self.http = http

    async def complete(self, tokens: int = 4, **fields: Any) -> httpx.Response:
        body = {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, **fields}
        return await self.http.post(COMPLETIONS, json=body)


@asynccontextmanager
async def operated(tokenizer, *, core: dict[str, Any] | None = None, **operations: Any):
    """Run an application whose prompts are token ids below 62."""
    engine = AsyncEngine(make_core(**core or {})[0])
    settings = ServerSettings(
        served_model_names=("m",),
        max_model_len=128,
        operations=OperationSettings(**operations),
    )
    app = create_app(engine, tokenizer, settings)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as http,
    ):
        yield Operated(app, engine, http)


def run(tokenizer, test: Callable[[Operated], Awaitable[None]], **options: Any) -> None:
    """Run a test against such an application."""

    async def go() -> None:
        async with operated(tokenizer, **options) as server:
            await test(server)

    asyncio.run(go())
