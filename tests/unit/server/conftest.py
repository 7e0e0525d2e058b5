"""A scripted engine behind the real application, reached without a port."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from support.tokenizers import write_tokenizer

from qinfer.engine.latency import Latencies
from qinfer.engine.request import FinishReason, TokenEvent, TokenLogprob, Usage
from qinfer.engine.streams import OnEnd, StreamItem
from qinfer.models.tokenizer import load_tokenizer
from qinfer.server.app import create_app
from qinfer.server.service import ServerSettings


class FakeEngine:
    """Answers every prompt with `text`, one byte per token, as `AsyncEngine` would."""

    def __init__(self, text: str = "Hello") -> None:
        self.text = text
        self.refusal: Exception | None = None  # raised before the first event
        self.error_after: int | None = None  # tokens before an event with an error
        self.contradictory = False  # that error is the request's own
        self.hangs_after: int | None = None  # tokens before nothing more comes
        self.ends_with: FinishReason = "stop"
        self.failure: str | None = None
        self.healthy = True
        self.latencies = Latencies()
        self.seen: list[tuple[list[int], Any, str]] = []
        self.running = 0
        self.aborted = 0

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Nothing to stop."""

    def retry_after(self) -> int:
        return 7

    def prepare(self, params: Any) -> None:
        """Nothing to compile."""

    async def stream(
        self, prompts: Mapping[str, list[int]], params: Any, *, on_end: OnEnd | None = None
    ) -> AsyncGenerator[list[StreamItem], None]:
        self.seen += [(prompt, params, request_id) for request_id, prompt in prompts.items()]
        if self.refusal is not None:
            raise self.refusal
        self.running += len(prompts)
        finished = False
        try:
            for batch in self._batches(prompts, params):
                if batch is None:
                    await asyncio.sleep(3600)
                else:
                    await asyncio.sleep(0)
                    yield batch
            finished = True
        finally:
            self.running -= len(prompts)
            self.aborted += 0 if finished else len(prompts)

    def _batches(self, prompts, params):
        for position in range(len(self.text.encode())):
            if position == self.hangs_after:
                yield None
            yield [
                (number, self._event(request_id, prompt, params, position, index))
                for number, (request_id, prompt) in enumerate(prompts.items())
                for index in range(getattr(params, "n", 1))
            ]
            if position == self.error_after:
                return

    def _event(self, request_id, prompt, params, position, index):
        if position == self.error_after:
            return TokenEvent(
                request_id,
                (),
                "",
                index,
                finish_reason="error",
                error="not finite",
                contradictory=self.contradictory,
            )
        token = self.text.encode()[position]
        last = position == len(self.text.encode()) - 1
        num_top = params.logprobs
        return TokenEvent(
            request_id=request_id,
            token_ids=(token,),
            text=chr(token),
            index=index,
            logprobs=None
            if num_top is None
            else (TokenLogprob(token, float("-inf") if last else -0.5 - index, _top(num_top)),),
            prompt_logprobs=None
            if params.prompt_logprobs is None or position
            else (
                None,
                *(TokenLogprob(t, -2.0, _top(params.prompt_logprobs)) for t in prompt[1:]),
            ),
            finish_reason=self.ends_with if last else None,
            usage=Usage(len(prompt), len(self.text), 2) if last else None,
        )


def _top(count):
    return tuple((id_, -float(id_)) for id_ in range(count))


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
