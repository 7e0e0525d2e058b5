"""Bodies that must be refused, each with status 400 and the name of the field."""

import json
from dataclasses import fields

import pytest

from qinfer.engine.beams import BeamParams
from qinfer.engine.params import MAX_N, StructuredOutput
from qinfer.server.bodies.completions import CompletionRequest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


PART = {"type": "text", "text": "x"}


def tool(name="f", **function):
    return {"type": "function", "function": {"name": name, **function}}


def nested(depth):
    return {} if depth == 0 else {"x": nested(depth - 1)}


def asdict_shallow(params):
    return {field.name: getattr(params, field.name) for field in fields(params)}


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
        ({"echo": "yes"}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 1000}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"beam_width": 2}, "beam_width"),
        ({"use_beam_search": True, "beam_width": 1000}, "beam_width"),
        ({"use_beam_search": True, "logprobs": 1}, "logprobs"),
        ({"use_beam_search": True, "presence_penalty": 1.0}, "presence_penalty"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": "x"}, "presence_penalty"),
        ({"typical_p": 0}, "typical_p"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 1000}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"priority": 2**40}, "priority"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json"),
        ({"guided_regex": "x" * 100_000}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"max_token": 5}, "max_token"),
    ],
)
def test_s03_s04_s05_completions_refused_by_field(call, engine, change, field):
    error = refuse(call, COMPLETIONS, {"prompt": "a"} | change)
    assert error["param"] is not None
    assert error["param"].split("[")[0].split(".")[0] == field
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
        ({"messages": [{"role": "user", "content": [PART] * 1000}] * 9}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [tool(parameters=nested(100))]}, "tools"),
        ({"tools": [tool(parameters={"x": "y" * 100_000})]}, "tools"),
        ({"tools": [tool(parameters={"x": "\ud800"})]}, "tools"),
        ({"tools": [tool()] * 1000}, "tools"),
        ({"tools": [tool()]}, "tools"),  # the template here has no place for them
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        (
            {
                "tools": [tool()],
                "tool_choice": {"type": "function", "function": {"name": "other"}},
            },
            "tool_choice",
        ),
        ({"best_of": 2}, "best_of"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
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
    unused = {name: values[-1] for name, values in CompletionRequest.unsupported.items()}
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


def test_every_sampling_field_reaches_the_engine(call, engine):
    body = {
        "prompt": "a",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "typical_p": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "logit_bias": {"5": -100, "6": 2.5},
        "allowed_token_ids": [5, 6],
        "bad_words": ["x"],
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": "\n",
        "stop_token_ids": [7],
        "ignore_eos": True,
        "seed": 3,
        "n": 2,
        "logprobs": 1,
        "prompt_logprobs": 2,
        "priority": -1,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "guided_regex": "a+",
    }
    assert call("POST", COMPLETIONS, json=body).status_code == 200
    (_, params, _) = engine.seen[0]
    given = {name: body[name] for name in body.keys() - {"prompt", "guided_regex"}}
    given |= {"logit_bias": ((5, -100.0), (6, 2.5)), "allowed_token_ids": (5, 6)}
    given |= {"stop": ("\n",), "bad_words": ("x",), "stop_token_ids": (7,)}
    given |= {"structured": StructuredOutput(regex="a+")}
    assert {name: value for name, value in asdict_shallow(params).items() if name in given} == given


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": {"type": "integer"}},
                }
            },
            {"json": {"type": "integer"}},
        ),
        ({"guided_json": {"type": "string"}}, {"json": {"type": "string"}}),
        ({"guided_json": '{"type":"string"}'}, {"json": '{"type":"string"}'}),
        ({"guided_choice": ["a", "b"]}, {"choice": ("a", "b")}),
        ({"guided_grammar": "start: A"}, {"grammar": "start: A"}),
        ({"structured_outputs": {"regex": "[ab]"}}, {"regex": "[ab]"}),
        ({"structured_outputs": {"json": {}}}, {"json": {}}),
        ({"structured_outputs": {"json_object": True}}, {"json": {"type": "object"}}),
    ],
)
def test_structure_is_asked_for_in_many_ways(asked, expected):
    structured = CompletionRequest.model_validate({"prompt": "a"} | asked).structured()
    assert structured == (None if expected is None else StructuredOutput(**expected))


def test_beam_searches_have_parameters_of_their_own():
    body = {"prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 5, "stop": "x"}
    params = CompletionRequest.model_validate(body).params()
    assert params == BeamParams(
        beam_width=2, num_return_sequences=2, max_tokens=5, stop=("x",), early_stopping=False
    )
    wide = body | {"beam_width": 7, "length_penalty": 0.5, "early_stopping": "never"}
    params = CompletionRequest.model_validate(wide).params()
    assert isinstance(params, BeamParams)
    assert (params.beam_width, params.length_penalty, params.early_stopping) == (7, 0.5, "never")


def test_the_openapi_document_describes_prompts():
    properties = CompletionRequest.model_json_schema()["properties"]
    assert {option["type"] for option in properties["prompt"]["anyOf"]} == {"string", "array"}
    assert properties["suffix"]["enum"] == [None, ""]
    assert "user" in properties


def test_n_is_bounded_by_the_engine():
    assert MAX_N < 1000
