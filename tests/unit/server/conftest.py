"""A scripted engine behind the real application, reached without a port."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from support.tokenizers import write_tokenizer

from qinfer.engine.params import SamplingParams
from qinfer.engine.request import TokenEvent, TokenLogprob, Usage
from qinfer.models.tokenizer import load_tokenizer
from qinfer.server.app import create_app
from qinfer.server.service import ServerSettings


class FakeEngine:
    """Answers every prompt with `text`, one byte per token, as `AsyncEngine` would."""

    def __init__(self, text: str = "Hello") -> None:
        self.text = text
        self.refusal: Exception | None = None  # raised before the first event
        self.error_after: int | None = None  # tokens before an event with an error
        self.hangs_after: int | None = None  # tokens before nothing more comes
        self.failure: str | None = None
        self.healthy = True
        self.seen: list[tuple[list[int], SamplingParams, str]] = []
        self.running = 0
        self.aborted = 0

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Nothing to stop."""

    async def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[TokenEvent, None]:
        self.seen.append((prompt_token_ids, params, request_id))
        if self.refusal is not None:
            raise self.refusal
        self.running += 1
        finished = False
        try:
            for event in self._events(prompt_token_ids, params, request_id):
                if event is None:
                    await asyncio.sleep(3600)
                else:
                    await asyncio.sleep(0)
                    yield event
            finished = True
        finally:
            self.running -= 1
            self.aborted += not finished

    def _events(self, prompt, params, request_id):
        for position, token in enumerate(self.text.encode()):
            for index in range(params.n):
                if position == self.error_after:
                    yield TokenEvent(
                        request_id, (), "", index, finish_reason="error", error="not finite"
                    )
                    return
                if position == self.hangs_after:
                    yield None
                last = position == len(self.text) - 1
                top = tuple((id_, -float(id_)) for id_ in range(params.logprobs or 0))
                yield TokenEvent(
                    request_id=request_id,
                    token_ids=(token,),
                    text=chr(token),
                    index=index,
                    logprobs=None
                    if params.logprobs is None
                    else (TokenLogprob(token, float("-inf") if last else -0.5, top),),
                    finish_reason="stop" if last else None,
                    usage=Usage(len(prompt), len(self.text), 2) if last else None,
                )


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """The byte tokenizer of the test models, with a ChatML template."""
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return load_tokenizer(path)


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def client(engine, tokenizer):
    """Return a context manager that opens a client; options are fields of `ServerSettings`.

    A further option, `tokenizer`, replaces the usual one.
    """

    @asynccontextmanager
    async def open_client(**settings):
        used = settings.pop("tokenizer", tokenizer)
        values: dict[str, Any] = {"served_model_names": ("m", "alias"), "max_model_len": 64}
        app = create_app(engine, used, ServerSettings(**values | settings))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as http,
        ):
            yield http

    return open_client


@pytest.fixture
def call(client):
    """Send one request to the application and return the response, from synchronous tests."""

    def send(method, path, *, settings=None, **options):
        async def go():
            async with client(**(settings or {})) as http:
                return await http.request(method, path, **options)

        return asyncio.run(go())

    return send
