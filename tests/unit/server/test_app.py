"""The routes over a scripted engine: shapes, streams, errors, limits."""

import asyncio
import json
from typing import Any

import pytest

from qinfer.errors import CapacityError, ContextLengthError, OverloadedError, RequestError

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def events(response):
    """Return the decoded chunks of a stream, whose last event must be [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(response, status):
    """Return OpenAI's error object of a response of the given status."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_completion(call, engine):
    answer = call("POST", COMPLETIONS, json={"model": "m", "prompt": "abc"}).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "m"
    assert answer["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert engine.seen[0][0] == list(b"abc")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_every_kind_of_prompt(call, engine, prompt, expected):
    answer = call("POST", COMPLETIONS, json={"prompt": prompt, "n": 2}).json()
    assert sorted(ids for ids, _, _ in engine.seen) == sorted(expected)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))  # once, whatever n is
    assert answer["usage"]["completion_tokens"] == 2 * 5 * len(expected)


def test_chat(call, engine, tokenizer):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    answer = call("POST", CHAT, json={"model": "alias", "messages": messages}).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hello",
        "refusal": None,
    }
    prompt = tokenizer.decode(engine.seen[0][0], skip_special_tokens=False)
    assert "<|im_start|>system\nbe brief<|im_end|>" in prompt
    assert "<|im_start|>user\na\nb<|im_end|>" in prompt
    assert engine.seen[0][1].max_tokens is None


def test_streams_say_the_same_as_whole_answers(call):
    body = {"prompt": ["a", "b"], "n": 2, "stream": True}
    chunks = events(call("POST", COMPLETIONS, json=body))
    texts = ["", "", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["Hello"] * 4
    assert len({chunk["id"] for chunk in chunks}) == 1

    chunks = events(call("POST", CHAT, json={"messages": USER, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "abc"}), (CHAT, {"messages": USER})]
)
def test_s06_usage_in_streams_only_on_request(call, path, body):
    without = events(call("POST", path, json=body | {"stream": True}))
    assert all("usage" not in chunk and chunk["choices"] for chunk in without)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(call("POST", path, json=body | options))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    refused = call("POST", path, json=body | {"stream_options": {"include_usage": True}})
    assert error_of(refused, 400)["param"] == "stream_options"


def test_e10_logprobs_of_completions(call):
    answer = call("POST", COMPLETIONS, json={"prompt": "abc", "logprobs": 2})
    logprobs = answer.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["H", "e", "l", "l", "o"]
    assert logprobs["token_logprobs"] == [-0.5] * 4 + [-9999.0]  # JSON has no infinity
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * 5
    body = {"prompt": "abc", "logprobs": 0, "stream": True}
    chunks = events(call("POST", COMPLETIONS, json=body))
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in chunks] == [[0], [1], [2], [3], [4]]


def test_e10_logprobs_of_chats(call):
    body = {"messages": USER, "logprobs": True, "top_logprobs": 1}
    content = call("POST", CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["H", "e", "l", "l", "o"]
    assert content[0]["bytes"] == [72]
    assert [len(entry["top_logprobs"]) for entry in content] == [1] * 5
    chunks = events(call("POST", CHAT, json=body | {"stream": True}))
    entries = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry["content"][0]["token"] for entry in entries] == ["H", "e", "l", "l", "o"]
    refused = call("POST", CHAT, json={"messages": USER, "top_logprobs": 1})
    assert error_of(refused, 400)["param"] == "top_logprobs"


def test_e13_models_show_the_usable_length(call):
    cards = call("GET", "/v1/models").json()
    assert [(card["id"], card["max_model_len"]) for card in cards["data"]] == [
        ("m", 64),
        ("alias", 64),
    ]
    assert call("GET", "/v1/models/alias").json()["id"] == "alias"
    assert error_of(call("GET", "/v1/models/x/y"), 404)["code"] == "model_not_found"
    refused = call("POST", COMPLETIONS, json={"model": "gpt", "prompt": "a"})
    assert error_of(refused, 404)["code"] == "model_not_found"


def test_health_turns_red_with_the_engine(call, engine):
    assert call("GET", "/health").status_code == 200
    engine.failure = "out of memory"
    response = call("GET", "/health")
    assert response.status_code == 503
    assert response.json() == {"status": "failed", "reason": "out of memory"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (ContextLengthError("130 tokens, 128 fit", field="prompt"), 400, "context_length_exceeded"),
        (RequestError("bad", field="seed"), 400, None),
        (CapacityError("larger than the cache"), 400, "capacity_exceeded"),
        (OverloadedError("1024 requests are open"), 429, "overloaded"),
        (RuntimeError("secret path"), 500, "internal_error"),
    ],
)
def test_refusals_of_the_engine_have_a_status(call, engine, refusal, status, code, stream):
    engine.refusal = refusal
    error = error_of(call("POST", COMPLETIONS, json={"prompt": "a", "stream": stream}), status)
    assert error["code"] == code
    assert "secret" not in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_g06_a_failed_request_is_an_error_not_a_text(call, engine, path):
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": USER}
    engine.error_after = 0
    assert error_of(call("POST", path, json=body), 500)["message"] == "not finite"
    assert error_of(call("POST", path, json=body | {"stream": True}), 500)["type"] == "server_error"
    engine.error_after = 2
    assert error_of(call("POST", path, json=body), 500)["message"] == "not finite"
    *_, last = events(call("POST", path, json=body | {"stream": True}))
    assert last["error"]["message"] == "not finite"


def test_a_request_that_contradicts_itself_is_its_own_fault(call, engine):
    engine.error_after, engine.contradictory = 2, True
    error = error_of(call("POST", COMPLETIONS, json={"prompt": "a"}), 400)
    assert error["type"] == "invalid_request_error"
    *_, last = events(call("POST", COMPLETIONS, json={"prompt": "a", "stream": True}))
    assert last["error"]["type"] == "invalid_request_error"


def test_s04_bodies_over_the_limit_are_refused(call, engine):
    body = {"prompt": "x" * 2000}
    small = {"max_body_bytes": 1000}
    declared = call("POST", COMPLETIONS, json=body, settings=small)
    assert error_of(declared, 413)["code"] == "body_too_large"

    async def pieces():
        for _ in range(10):
            yield json.dumps(body).encode()

    chunked = call(
        "POST",
        COMPLETIONS,
        content=pieces(),
        headers={"content-type": "application/json"},
        settings=small,
    )
    assert error_of(chunked, 413)["code"] == "body_too_large"
    assert engine.seen == []


def test_s01_abandoned_requests_are_aborted(client, engine):
    """Cancelling the client's task is how the ASGI transport ends a connection early."""
    engine.hangs_after = 2

    async def go():
        async with client() as http:
            for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}):
                task = asyncio.create_task(http.post(COMPLETIONS, json=body))
                while engine.running == 0:
                    await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                while engine.running:
                    await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(go(), 100))
    assert engine.aborted == 2


def test_overload_says_when_to_come_back(call, engine):
    engine.refusal = OverloadedError("full", retry_after=12)
    response = call("POST", COMPLETIONS, json={"prompt": "a"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "12")
    assert response.json()["error"]["type"] == "rate_limit_error"


def test_unknown_routes_and_methods_have_openai_errors(call):
    assert error_of(call("GET", "/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(call("GET", "/v1/models/"), 404)["code"] == "model_not_found"
    assert error_of(call("GET", COMPLETIONS), 405)["code"] == "method_not_allowed"
    for path in ("/docs", "/redoc"):  # pages that load scripts from elsewhere
        assert error_of(call("GET", path), 404)["code"] == "not_found"


def test_continuous_usage_in_every_chunk(call):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["abc", "d"], "stream": True, "stream_options": options}
    *chunks, last = events(call("POST", COMPLETIONS, json=body))
    counts: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chunks:
        counts[chunk["choices"][0]["index"]].append(chunk["usage"])
    assert [usage["completion_tokens"] for usage in counts[0]] == [1, 2, 3, 4, 5]
    assert {usage["prompt_tokens"] for usage in counts[0]} == {3}
    assert {usage["prompt_tokens"] for usage in counts[1]} == {1}
    assert last["usage"]["total_tokens"] == 4 + 10


def test_best_of_shows_the_likeliest(call, engine):
    body = {"prompt": ["a", "b"], "n": 1, "best_of": 3}
    answer = call("POST", COMPLETIONS, json=body).json()
    assert engine.seen[0][1].n == 3
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 2 * 3 * 5
