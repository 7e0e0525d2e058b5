"""Tools in chats: what the model sees, what its output must be, and the calls that come back."""

import json

import pytest
from support.tokenizers import byte_level, write_tokenizer

from qinfer.models.tokenizer import load_tokenizer
from qinfer.server.bodies.tools import Tool
from qinfer.server.tool_choice import calls_schema

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.a }}</tool_call>"
    "{% endfor %}{% if m.name %}({{ m.name }}){% endif %};{% endfor %}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def tool(name="add", **parameters):
    return {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": parameters},
    }


TOOLS = [tool(type="object", properties={"a": {"type": "integer"}})]


@pytest.fixture
def ask(call, tmp_path):
    """Send a chat with tools to a model whose template knows them."""
    write_tokenizer(tmp_path, byte_level(), chat_template=TEMPLATE)
    settings = {"tokenizer": load_tokenizer(tmp_path), "max_model_len": 1000}

    def send(**body):
        body = {"messages": [USER], "tools": TOOLS} | body
        return call("POST", CHAT, json=body, settings=settings)

    return send


def streamed(response):
    """Return the message that a stream's deltas add up to, and its finish reason."""
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line][:-1]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    content = ""
    calls: list[list[str]] = []
    for choice in choices:
        content += choice["delta"].get("content", "")
        for delta in choice["delta"].get("tool_calls", ()):
            if delta["index"] == len(calls):
                calls.append([delta["id"], delta["type"], delta["function"]["name"], ""])
            calls[delta["index"]][3] += delta["function"]["arguments"]
    return content, [tuple(call) for call in calls], choices[-1]["finish_reason"]


def test_tools_are_shown_to_the_model(ask, engine):
    assert ask().status_code == 200
    prompt = bytes(engine.seen[0][0]).decode()
    assert prompt.startswith('[{"type": "function", "function": {"name": "add", "description"')
    assert ask(tool_choice="none").status_code == 200
    assert bytes(engine.seen[1][0]).decode() == "user:hi;"


def test_a_call_whole_and_streamed(ask, engine):
    engine.text = f"Sure.\n{CALL}"
    (choice,) = ask().json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Sure."
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    content, calls, reason = streamed(ask(stream=True))
    assert (content, reason) == ("Sure.", "tool_calls")
    assert [call[1:] for call in calls] == [("function", "add", '{"a": 1}')]


def test_no_call_is_just_text(ask, engine):
    (choice,) = ask().json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert streamed(ask(stream=True)) == ("Hello", [], "stop")


def test_parallel_calls_can_be_turned_off(ask, engine):
    engine.text = CALL + CALL
    assert len(ask().json()["choices"][0]["message"]["tool_calls"]) == 2
    message = ask(parallel_tool_calls=False).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1


def test_required_calls_are_made_certain(ask, engine):
    engine.text = '[{"name": "add", "parameters": {"a": 2}}]'
    (choice,) = ask(tool_choice="required").json()["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": '{"a": 2}',
    }
    assert choice["finish_reason"] == "tool_calls"
    schema = json.loads(engine.seen[0][1].structured.json)
    assert schema["minItems"] == 1
    assert schema["items"]["properties"]["name"] == {"type": "string", "enum": ["add"]}
    assert streamed(ask(tool_choice="required", stream=True))[2] == "tool_calls"


def test_a_named_call_is_its_arguments(ask, engine):
    engine.text = '{"a": 3}'
    choice = {"type": "function", "function": {"name": "add"}}
    (answer,) = ask(tool_choice=choice).json()["choices"]
    assert answer["message"]["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": '{"a": 3}',
    }
    assert answer["finish_reason"] == "stop"  # as OpenAI does
    assert json.loads(engine.seen[0][1].structured.json) == TOOLS[0]["function"]["parameters"]
    _, calls, _ = streamed(ask(tool_choice=choice, stream=True))
    assert [call[2:] for call in calls] == [("add", '{"a": 3}')]


def test_calls_and_results_in_the_history(ask, engine):
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 7}'},
    }
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "8"},
    ]
    assert ask(messages=messages, tools=[]).status_code == 200
    prompt = bytes(engine.seen[0][0]).decode()
    assert prompt == "user:hi;assistant:<tool_call>7</tool_call>;tool:8(add);"


@pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', "[" * 5000, '{"a": "\\ud800"}'])
def test_arguments_in_the_history_must_be_objects(ask, engine, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    response = ask(messages=[USER, {"role": "assistant", "tool_calls": [call]}, USER])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert engine.seen == []


def test_two_structures_at_once_are_refused(ask, engine):
    structure = {"type": "json_object"}
    assert ask(tool_choice="required", response_format=structure).status_code == 400
    engine.text = CALL
    (choice,) = ask(response_format=structure).json()["choices"]  # then it is no call
    assert choice["message"]["content"] == CALL


def test_definitions_move_to_where_their_references_point():
    shared = {"$defs": {"x": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/x"}}}
    tools = [Tool.model_validate(tool(name, **shared)) for name in ("f", "g")]
    schema = calls_schema(tools, max_calls=1)
    assert schema["$defs"] == {"x": {"type": "integer"}}
    assert schema["maxItems"] == 1
    assert [item["properties"]["name"]["enum"] for item in schema["items"]["anyOf"]] == [
        ["f"],
        ["g"],
    ]
    other = Tool.model_validate(tool("h", **{"$defs": {"x": {"type": "string"}}}))
    with pytest.raises(Exception, match="differently"):
        calls_schema([*tools, other], max_calls=None)
