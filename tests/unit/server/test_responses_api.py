"""/v1/responses over a scripted engine."""

import json

import pytest

RESPONSES = "/v1/responses"


def events(response):
    """Return (event, data) of a stream, whose data repeat the event's name."""
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert value["type"] == name.removeprefix("event: ")
        found.append(value)
    assert [value["sequence_number"] for value in found] == list(range(len(found)))
    return found


def test_whole(call, engine, tokenizer):
    body = {"model": "m", "input": "hi", "instructions": "be brief", "max_output_tokens": 9}
    answer = call("POST", RESPONSES, json=body).json()
    assert answer["object"] == "response"
    assert (answer["status"], answer["error"], answer["incomplete_details"]) == (
        "completed",
        None,
        None,
    )
    (message,) = answer["output"]
    assert message["content"] == [
        {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    ]
    prompt, params, _ = engine.seen[0]
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>")
    assert params.max_tokens == 9
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(prompt), 5)
    assert usage["input_tokens_details"] == {"cached_tokens": 2}


def test_messages_and_earlier_answers(call, engine, tokenizer):
    earlier = call("POST", RESPONSES, json={"input": "hi"}).json()["output"][0]
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
        earlier,
        {"type": "message", "role": "user", "content": "again"},
    ]
    assert call("POST", RESPONSES, json={"input": messages}).status_code == 200
    text = tokenizer.decode(engine.seen[-1][0], skip_special_tokens=False)
    parts = ["system\nd", "user\nu", "assistant\nHello", "user\nagain"]
    assert text.startswith("".join(f"<|im_start|>{part}<|im_end|>\n" for part in parts))


def test_streamed(call):
    found = events(call("POST", RESPONSES, json={"input": "hi", "stream": True}))
    kinds = [value["type"].removeprefix("response.") for value in found]
    assert kinds == [
        *["created", "in_progress", "output_item.added", "content_part.added"],
        *["output_text.delta"] * 5,
        *["output_text.done", "content_part.done", "output_item.done", "completed"],
    ]
    deltas = [value["delta"] for value in found if value["type"].endswith("delta")]
    final = found[-1]["response"]
    assert "".join(deltas) == final["output"][0]["content"][0]["text"] == "Hello"
    assert final["usage"]["output_tokens"] == 5
    ids = {value["item_id"] for value in found if "item_id" in value}
    assert ids == {final["output"][0]["id"]}


def test_cut_off_by_the_limit(call, engine):
    engine.ends_with = "length"
    answer = call("POST", RESPONSES, json={"input": "hi"}).json()
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    last = events(call("POST", RESPONSES, json={"input": "hi", "stream": True}))[-1]
    assert last["type"] == "response.incomplete"


def test_g06_errors_in_mid_stream(call, engine):
    engine.error_after = 2
    *_, failed, error = events(call("POST", RESPONSES, json={"input": "hi", "stream": True}))
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["message"] == "not finite"
    assert (error["type"], error["message"]) == ("error", "not finite")


def test_the_format_of_the_text(call, engine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = call("POST", RESPONSES, json={"input": "hi", "text": {"format": wanted}}).json()
    assert json.loads(engine.seen[0][1].structured.json) == schema
    assert answer["text"]["format"] == wanted


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_schema"}, "verbosity": "high"}}, "verbosity"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
def test_refused_by_field(call, engine, change, field):
    response = call("POST", RESPONSES, json={"input": "hi"} | change)
    assert response.status_code == 400
    assert response.json()["error"]["param"].split("[")[0] == field
    assert engine.seen == []
