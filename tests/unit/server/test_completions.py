"""Echo and log-probabilities of prompts."""

import json

import pytest

COMPLETIONS = "/v1/completions"


def chunks(response):
    lines = [line for line in response.text.split("\n\n") if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
def test_echo(call, prompt):
    body = {"prompt": prompt, "echo": True}
    (choice,) = call("POST", COMPLETIONS, json=body).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("abcHello", None)
    streamed = chunks(call("POST", COMPLETIONS, json=body | {"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "abcHello"
    assert streamed[0]["choices"][0]["text"] == "abc"


def test_echo_with_logprobs(call, engine):
    body = {"prompt": "abc", "echo": True, "logprobs": 1}
    (choice,) = call("POST", COMPLETIONS, json=body).json()["choices"]
    assert engine.seen[0][1].prompt_logprobs == 1
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list("abcHello")
    assert logprobs["token_logprobs"] == [None, -2.0, -2.0] + [-0.5] * 4 + [-9999.0]
    assert logprobs["text_offset"] == list(range(8))
    assert logprobs["top_logprobs"][0] is None
    assert [len(top) for top in logprobs["top_logprobs"][1:]] == [1] * 7
    streamed = chunks(call("POST", COMPLETIONS, json=body | {"stream": True}))
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    for name, values in logprobs.items():
        assert [item for part in parts for item in part[name]] == values


def test_e12_only_the_prompt_is_scored(call, engine):
    body = {"prompt": ["ab", "cd"], "echo": True, "max_tokens": 0, "logprobs": 0}
    answer = call("POST", COMPLETIONS, json=body).json()
    assert engine.seen[0][1].max_tokens == 1  # a step is needed; its token is not shown
    for choice, text in zip(answer["choices"], ("ab", "cd"), strict=True):
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert choice["logprobs"]["tokens"] == list(text)
    assert answer["usage"]["completion_tokens"] == 0
    streamed = chunks(call("POST", COMPLETIONS, json=body | {"stream": True}))
    assert {chunk["choices"][0]["text"] for chunk in streamed} == {"ab", "cd", ""}


def test_prompt_logprobs_in_vllms_layout(call, engine):
    body = {"prompt": "ab", "prompt_logprobs": 2}
    (choice,) = call("POST", COMPLETIONS, json=body).json()["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second["0"] == {"logprob": -0.0, "rank": 1, "decoded_token": "\x00"}
    assert second["98"] == {"logprob": -2.0, "rank": None, "decoded_token": "b"}
    plain = call("POST", COMPLETIONS, json={"prompt": "ab"}).json()["choices"][0]
    assert "prompt_logprobs" not in plain
    chat = {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 0}
    answer = call("POST", "/v1/chat/completions", json=chat).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
