"""Every option of the API through the official `openai` client, against a real engine."""

import asyncio
import json
import math
from typing import Any

import httpx
import openai
import pytest
from support.checkpoints import edit_json, write_script
from support.live import live_server

TEXT = "ABCDEFGHIJK"
USER: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 41}}</tool_call>'
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{# calls are <tool_call> #}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls or '' }};{% endfor %}"
)
STREAM_KINDS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * len(TEXT),
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture(scope="module")
def server(script_model):
    with live_server(script_model) as live:
        yield live


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A server whose model answers everything with a call."""
    path = tmp_path_factory.mktemp("caller") / "model"
    write_script(path, CALL, vocab_size=320, max_position=1024)
    edit_json(path / "tokenizer_config.json", chat_template=TOOL_TEMPLATE)
    with live_server(path) as live:
        yield live


@pytest.fixture(scope="module")
def random_server(tiny_llama):
    with live_server(tiny_llama) as live:
        yield live


def connect(live):
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(server):
    with connect(server) as client:
        yield client


def complete(client, **options):
    fields = {"model": "m", "prompt": "hello", "temperature": 0} | options
    return client.completions.create(**fields).choices[0]


def test_penalties_and_bans(client):
    # After "A" its successor has a logit of sqrt(288), all others 0.
    assert complete(client, max_tokens=2).text == "AB"
    assert complete(client, max_tokens=1, logit_bias={"65": -100, "90": 50}).text == "Z"
    assert complete(client, max_tokens=2, extra_body={"bad_words": ["B"]}).text[1] != "B"
    assert complete(client, max_tokens=1, extra_body={"allowed_token_ids": [88, 89]}).text == "X"
    for name in ("presence_penalty", "frequency_penalty"):
        assert complete(client, **{name: 1.5}).text == TEXT  # nothing comes twice
    for extra in ({"typical_p": 0.5}, {"min_p": 0.5}, {"top_k": 1}, {"repetition_penalty": 1.2}):
        assert complete(client, temperature=1, extra_body=extra, max_tokens=3).text == "ABC"


def test_ends(client):
    assert complete(client, stop=["F"]).text == "ABCDE"
    kept = complete(client, stop="F", extra_body={"include_stop_str_in_output": True})
    assert kept.text == "ABCDEF"
    longer = complete(client, max_tokens=20, extra_body={"ignore_eos": True})
    assert longer.text.startswith(TEXT)
    assert longer.finish_reason == "length"
    assert complete(client, max_tokens=20, extra_body={"min_tokens": 15}).finish_reason == "length"
    assert complete(client, extra_body={"priority": -5}).text == TEXT


def test_echo_and_logprobs_of_the_prompt(client):
    whole = complete(client, echo=True, logprobs=2, max_tokens=3)
    assert whole.text == "helloABC"
    logprobs = whole.logprobs
    assert logprobs.tokens == list("helloABC")
    assert logprobs.token_logprobs[0] is None
    sure = math.sqrt(288) - math.log(math.exp(math.sqrt(288)) + 287)
    assert logprobs.token_logprobs[5:] == pytest.approx([sure] * 3, abs=1e-4)
    assert logprobs.token_logprobs[1] == pytest.approx(sure - math.sqrt(288), abs=1e-4)
    assert [len(top) for top in logprobs.top_logprobs[1:]] == [2] * 7
    only = complete(client, echo=True, logprobs=2, max_tokens=0)
    assert only.text == "hello"
    assert only.logprobs.token_logprobs == logprobs.token_logprobs[:5]
    extra = complete(client, max_tokens=1, extra_body={"prompt_logprobs": 1})
    assert extra.prompt_logprobs[0] is None
    assert len(extra.prompt_logprobs) == 5


def test_e12_scoring_a_text_of_two_choices_costs_one_prompt(client):
    answer = client.completions.create(
        model="m", prompt=["ab", "cd"], echo=True, max_tokens=0, logprobs=0
    )
    assert [choice.text for choice in answer.choices] == ["ab", "cd"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 0)


def test_best_of_is_the_likeliest(random_server):
    with connect(random_server) as client:
        options = {"model": "m", "prompt": "ab", "temperature": 1.0, "seed": 5, "max_tokens": 6}
        all_four = client.completions.create(n=4, logprobs=0, **options)
        best = client.completions.create(n=2, best_of=4, logprobs=0, **options)

    def mean(choice):
        values = choice.logprobs.token_logprobs
        return sum(values) / len(values)

    ranked = sorted(all_four.choices, key=mean, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert best.usage.completion_tokens == all_four.usage.completion_tokens


def test_beam_search(random_server):
    with connect(random_server) as client:
        fields: dict[str, Any] = {"model": "m", "prompt": "ab", "max_tokens": 6, "n": 2}
        extra = {"use_beam_search": True, "beam_width": 3, "ignore_eos": True}
        whole = client.completions.create(**fields, extra_body=extra)
        assert len({choice.text for choice in whole.choices}) == 2
        chunks = list(client.completions.create(**fields, extra_body=extra, stream=True))
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


@pytest.mark.parametrize("seed", [1, 2])
def test_structured_output(random_server, seed):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    with connect(random_server) as client:
        fields: dict[str, Any] = {"model": "m", "temperature": 1, "seed": seed, "max_tokens": 100}
        answer = client.chat.completions.create(
            messages=USER,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": schema},
            },
            **fields,
        )
        value = json.loads(answer.choices[0].message.content)
        assert isinstance(value["ok"], bool)
        assert value["n"] in (1, 22)
        choice = client.completions.create(
            prompt="a", extra_body={"guided_choice": ["red", "green"]}, **fields
        )
        assert choice.choices[0].text in ("red", "green")
        text = client.responses.create(
            model="m",
            input="hi",
            max_output_tokens=90,
            text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
        ).output_text
        assert json.loads(text).keys() == {"ok", "n"}
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(prompt="a", extra_body={"guided_regex": "("}, **fields)
        assert refused.value.param == "guided_regex"


def test_tools(caller):
    with connect(caller) as client:
        fields: dict[str, Any] = {"model": "m", "messages": USER, "tools": [TOOL], "temperature": 0}
        choice = client.chat.completions.create(**fields).choices[0]
        assert choice.finish_reason == "tool_calls"
        call = choice.message.tool_calls[0]
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 41}')
        history = [
            *USER,
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "42"},
        ]
        again = client.chat.completions.create(**fields | {"messages": history, "max_tokens": 5})
        assert again.usage.prompt_tokens > 50
        with client.chat.completions.stream(**fields) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.message.tool_calls[0].function.arguments == '{"a": 41}'
        none = client.chat.completions.create(**fields, tool_choice="none").choices[0]
        assert none.message.content == CALL
        assert none.message.tool_calls is None


def test_demanded_calls(caller):
    named = {"type": "function", "function": {"name": "add"}}
    with connect(caller) as client:
        for choice in ("required", named):
            fields: dict[str, Any] = {
                "model": "m",
                "messages": USER,
                "tools": [TOOL],
                "tool_choice": choice,
            }
            answer = client.chat.completions.create(**fields, temperature=0, max_tokens=200)
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.name == "add"
            if answer.choices[0].finish_reason != "length":
                assert isinstance(json.loads(call.function.arguments), dict)


def test_responses(client):
    whole = client.responses.create(model="m", input="hello", instructions="x", temperature=0)
    assert (whole.output_text, whole.status) == (TEXT, "completed")
    assert whole.usage.output_tokens == len(TEXT) + 1
    messages = [{"role": "user", "content": "hello"}]
    stream = client.responses.create(model="m", input=messages, temperature=0, stream=True)
    events = list(stream)
    assert [event.type for event in events] == STREAM_KINDS
    assert events[-1].response.output_text == TEXT
    with client.responses.stream(model="m", input="hello", temperature=0) as stream:
        assert stream.get_final_response().output_text == TEXT
    cut = client.responses.create(model="m", input="hello", temperature=0, max_output_tokens=2)
    assert (cut.output_text, cut.incomplete_details.reason) == ("AB", "max_output_tokens")
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="m", input="again", previous_response_id=whole.id)
    assert refused.value.param == "previous_response_id"


def test_the_asynchronous_client(server):
    async def go():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            fields: dict[str, Any] = {"model": "m", "temperature": 0}
            whole = await client.chat.completions.create(messages=USER, **fields)
            stream = await client.chat.completions.create(messages=USER, stream=True, **fields)
            streamed = [chunk async for chunk in stream]
            responses = await client.responses.create(input="hi", stream=True, **fields)
            events = [event async for event in responses]
            text = await client.completions.create(prompt="hi", **fields)
            models = [model.id async for model in client.models.list()]
            return whole, streamed, events, text, models

    whole, streamed, events, text, models = asyncio.run(go())
    assert whole.choices[0].message.content == text.choices[0].text == TEXT
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == TEXT
    assert [event.type for event in events] == STREAM_KINDS
    assert models == ["m"]


def test_what_there_is_not_is_refused_in_words(client):
    with pytest.raises(openai.InternalServerError) as refused:
        client.embeddings.create(model="m", input="x")
    assert refused.value.status_code == 501
    assert "embeddings are not supported" in refused.value.message
    with pytest.raises(openai.InternalServerError) as refused:
        client.files.list()
    assert refused.value.code == "not_supported"


def test_tokens_there_and_back(server):
    body = {"prompt": "héllo"}
    tokens = httpx.post(f"{server.url}/tokenize", json=body).json()
    assert tokens["count"] == len("héllo".encode())
    back = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens["tokens"]})
    assert back.json() == body


def test_continuous_usage_and_request_ids(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    raw = client.with_raw_response.chat.completions.create(
        model="m",
        messages=USER,
        stream=True,
        temperature=0,
        stream_options=options,
        extra_headers={"X-Request-Id": "mine-1"},
    )
    assert raw.headers["x-request-id"] == "mine-1"
    *chunks, last = list(raw.parse())
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last.usage.completion_tokens == len(TEXT) + 1
