"""Bodies: content types, sizes, and errors that name the field."""

import asyncio
import json

import pytest
from pydantic import BaseModel, ConfigDict

from qinfer.errors import RequestError
from qinfer.server.reading import SMALL_BODY, parse

COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json; charset=utf-8"}


class Inner(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    size: int


class Outer(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    items: list[Inner]


@pytest.mark.parametrize("padding", [0, SMALL_BODY])
@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ('{"items": [{"size": 1}, {"size": "x"}]}', "items[1].size", "valid integer"),
        ('{"items": [{"size": 1, "colour": 2}]}', "items[0].colour", "unknown field"),
        ('{"items": 1}', "items", "valid list"),
        ("[]", None, "valid dictionary"),
        ('{"items": [}', None, "not valid JSON"),
        ('{"items": [' + "1" * 5000 + "]}", None, "not valid JSON"),
        ('{"items": ' + "[" * 2000, None, "not valid JSON"),
        ('{"' + "x" * 5000 + '": 1}', None, "unknown field"),
        ('{"items": [], "\\ud800": 1}', None, "unicode string"),
    ],
)
def test_s03_errors_are_the_same_for_small_and_large_bodies(text, field, words, padding):
    with pytest.raises(RequestError, match=words) as refused:
        parse(text.encode() + b" " * padding, Outer)
    assert (refused.value.field or "items") == (field or "items")
    assert len(str(refused.value)) < 500


def test_bytes_that_are_no_utf8():
    with pytest.raises(RequestError, match="not valid JSON"):
        parse(b'{"items": "\xff"}', Outer)
    assert parse(b'\xef\xbb\xbf{"items": []}', Outer) == Outer(items=[])


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_only_json_is_read(call, engine, kind):
    """A page of another site can make a browser send these without asking first."""
    headers = {} if kind is None else {"content-type": kind}
    response = call("POST", COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 400
    assert "Content-Type" in response.json()["error"]["message"]
    assert engine.seen == []
    assert call("POST", COMPLETIONS, content=b'{"prompt": "a"}', headers=JSON).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "stop": ["x"] * 500_000},
        {"prompt": "a", "logit_bias": {str(i): 0 for i in range(100_000)}},
        {"prompt": ["a"] * 500_000},
        {"prompt": "a"} | {f"x{i}": 0 for i in range(100_000)},
        {"prompt": "a", "stop_token_ids": list(range(300_000))},
    ],
    ids=["stop", "bias", "prompts", "fields", "ids"],
)
def test_s04_many_items_are_refused_while_health_answers(client, engine, body):
    data = json.dumps(body).encode()

    async def go():
        async with client() as http:
            task = asyncio.create_task(http.post(COMPLETIONS, content=data, headers=JSON))
            answered = 0
            while not task.done():
                assert (await http.get("/health")).status_code == 200
                answered += 1
                await asyncio.sleep(0.001)
            assert (await task).status_code == 400
            assert answered > 1

    asyncio.run(go())
    assert engine.seen == []


def test_large_prompts_of_ids_are_read(call, engine):
    ids = [1, 22, 333] * 8000
    response = call("POST", COMPLETIONS, json={"prompt": ids}, settings={"max_model_len": 100_000})
    assert response.status_code == 200
    assert engine.seen[0][0] == ids
    refused = call("POST", COMPLETIONS, json={"prompt": ids})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
