"""The official `openai` client against a real server with known answers."""

import asyncio
import math

import openai
import pytest
from support.checkpoints import write_script
from support.live import live_server

TEXT = "ABCDEFGHIJK"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(script_model):
    with live_server(script_model) as live:
        yield live


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").max_model_len == 512


def test_completion(client):
    answer = client.completions.create(model="m", prompt="hello", temperature=0)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, len(TEXT) + 1)


def test_chat(client):
    answer = client.chat.completions.create(model="m", messages=USER, temperature=0)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({"max_tokens": 3}, "ABC", "length"),
        ({"stop": "DEFGHIJ"}, "ABC", "stop"),
        ({"stop": ["DEX"]}, TEXT, "stop"),
        ({"extra_body": {"stop_token_ids": [ord("E")]}}, "ABCD", "stop"),
    ],
)
def test_d01_streams_equal_whole_answers(client, options, text, reason):
    arguments = {"model": "m", "temperature": 0} | options
    whole = client.completions.create(prompt="hello", **arguments).choices[0]
    assert (whole.text, whole.finish_reason) == (text, reason)
    chunks = list(client.completions.create(prompt="hello", stream=True, **arguments))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == reason
    chat = list(client.chat.completions.create(messages=USER, stream=True, **arguments))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == text


def test_s06_usage_in_the_last_chunk(client):
    arguments = {"model": "m", "messages": USER, "stream": True, "temperature": 0}
    chunks = list(
        client.chat.completions.create(**arguments, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(TEXT) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all(chunk.choices for chunk in client.chat.completions.create(**arguments))


def test_e10_logprobs_are_the_models_whatever_the_temperature(client):
    logit = math.sqrt(288)
    expected = logit - math.log(math.exp(logit) + 287)  # SCRIPT: one logit, the others zero
    for temperature in (0.01, 1, 2):
        entry = (
            client.chat.completions.create(
                model="m",
                messages=USER,
                logprobs=True,
                top_logprobs=5,
                max_tokens=1,
                temperature=temperature,
                seed=0,
            )
            .choices[0]
            .logprobs.content[0]
        )
        assert len(entry.top_logprobs) == 5
        assert entry.top_logprobs[0].token == "A"
        assert entry.top_logprobs[0].logprob == pytest.approx(expected, abs=1e-4)
        assert entry.bytes == list(entry.token.encode())


def test_n_and_several_prompts(client):
    answer = client.completions.create(model="m", prompt=["a", "b"], n=2, temperature=0)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (index, TEXT) for index in range(4)
    ]
    assert answer.usage.prompt_tokens == 2


def test_concurrent_requests_do_not_mix(server):
    async def go():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(
                *[
                    client.completions.create(
                        model="m", prompt="x" * size, max_tokens=size, temperature=0
                    )
                    for size in range(1, 12)
                ]
            )

    texts = [answer.choices[0].text for answer in asyncio.run(go())]
    assert texts == [TEXT[:size] for size in range(1, 12)]


def test_errors_are_the_clients_own_classes(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=USER, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="m", prompt="a" * 600)
    assert refused.value.code == "context_length_exceeded"


def test_text_that_needs_several_tokens_streams_whole(tmp_path):
    """Characters of several bytes never come out in halves (one byte per token here)."""
    text = "né 깰 🙂!"
    write_script(tmp_path / "model", text, vocab_size=320)
    with (
        live_server(tmp_path / "model") as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none") as client,
    ):
        chunks = list(
            client.completions.create(model="m", prompt="x", stream=True, temperature=0, logprobs=1)
        )
        whole = client.completions.create(model="m", prompt="x", temperature=0)
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == whole.choices[0].text == text
    assert "�" not in "".join(pieces)
    entries = [chunk.choices[0].logprobs for chunk in chunks]
    assert (
        sum(len(entry.tokens or ()) for entry in entries if entry is not None)
        == len(text.encode()) + 1
    )  # one per token, and the end
