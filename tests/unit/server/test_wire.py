"""Bodies that must be refused, each with status 400 and the name of the field."""

import json

import pytest

from qinfer.engine.params import MAX_N
from qinfer.server.wire import UNSUPPORTED, CompletionRequest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def refuse(call, path, body):
    headers = {"content-type": "application/json"}
    response = call("POST", path, content=json.dumps(body), headers=headers)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    "content",
    [b"{:", b"", b"\xff\xfe{}", b'{"prompt": "\xff"}', b"[1, 2]", b'"text"', b"[" * 100_000],
    ids=["syntax", "empty", "utf8", "utf8-inside", "list", "text", "nested"],
)
def test_s03_malformed_json(call, engine, content):
    for path in (COMPLETIONS, CHAT):
        response = call("POST", path, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert engine.seen == []


def test_s03_wrong_content_type(call):
    headers = {"content-type": "text/plain"}
    response = call("POST", COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 400


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["a"] * 300}, "prompt"),
        ({"prompt": ["a"] * 256, "n": 3}, "n"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"max_tokens": "five"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 100_000}, "n"),
        ({"logprobs": 1000}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop": "x" * 10_000}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"model": "m" * 10_000}, "model"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"max_token": 5}, "max_token"),
    ],
)
def test_s03_s04_s05_completions_refused_by_field(call, engine, change, field):
    error = refuse(call, COMPLETIONS, {"prompt": "a"} | change)
    assert error["param"] is not None
    assert error["param"].split("[")[0] == field
    assert len(error["message"]) < 1000
    assert engine.seen == []


def test_e08_nan_in_json(call):
    body = json.dumps({"prompt": "a", "temperature": float("nan")})
    response = call("POST", COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_logprobs": 21, "logprobs": True}, "logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs"),
    ],
)
def test_s03_chats_refused_by_field(call, engine, change, field):
    messages = [{"role": "user", "content": "hi"}]
    error = refuse(call, CHAT, {"messages": messages} | change)
    assert error["param"].split("[")[0].split(".")[0] == field
    assert engine.seen == []


def test_unused_and_meaningless_fields_are_accepted(call, engine):
    unused = {name: values[-1] for name, values in UNSUPPORTED.items()}
    ignored = {"user": "me", "store": False, "metadata": {"a": "b"}}
    response = call("POST", COMPLETIONS, json={"prompt": "a"} | unused | ignored)
    assert response.status_code == 200, response.text


def test_values_that_clients_send_in_practice(call, engine):
    messages = [
        {"role": "user", "content": "hi"},
        # what a client sends back of an earlier answer
        {"role": "assistant", "content": "yo", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "hi", "name": "ann"},
    ]
    body = {
        "messages": messages,
        "temperature": 1,
        "max_tokens": 4,
        "max_completion_tokens": 4,
        "stop": None,
        "n": None,
        "seed": -1,
        "stream": None,
        "response_format": {"type": "text"},
        "presence_penalty": 0.0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert call("POST", CHAT, json=body).status_code == 200
    params = engine.seen[0][1]
    assert (params.max_tokens, params.seed, params.n, params.stop) == (4, -1, 1, ())


def test_the_openapi_document_describes_prompts():
    schema = CompletionRequest.model_json_schema()["properties"]["prompt"]
    assert {option["type"] for option in schema["anyOf"]} == {"string", "array"}


def test_n_is_bounded_by_the_engine():
    assert MAX_N < 1000
