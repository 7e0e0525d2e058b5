"""The OpenAPI document says what the server does."""

import json

import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.fixture
def document(call):
    return call("GET", "/openapi.json").json()


def test_all_routes_are_there(document):
    paths = {COMPLETIONS, CHAT, "/v1/responses", "/tokenize", "/detokenize", "/v1/models"}
    assert paths | {"/v1/models/{name}", "/health"} <= set(document["paths"])


def test_every_reference_leads_somewhere(document):
    text = json.dumps(document)
    references = {part.split('"')[0] for part in text.split('"$ref": "')[1:]}
    assert len(references) > 10
    for reference in references:
        assert reference.startswith("#/components/schemas/")
        node = document
        for step in reference.removeprefix("#/").split("/"):
            node = node[step]


def test_statuses_of_a_route_with_a_body(document):
    responses = document["paths"][CHAT]["post"]["responses"]
    assert set(responses) == {"200", "400", "404", "408", "413", "429", "500", "503"}
    assert "text/event-stream" in responses["200"]["content"]
    error = responses["400"]["content"]["application/json"]["schema"]
    assert error == {"$ref": "#/components/schemas/ErrorResponse"}
    assert "X-Request-Id" in responses["400"]["headers"]
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_bodies_are_described(document):
    body = document["paths"][CHAT]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    schema = document["components"]["schemas"]["ChatRequest"]
    assert {"messages", "tools", "response_format", "top_k"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False


def test_fields_beside_openais_need_not_be_there(document):
    choice = document["components"]["schemas"]["CompletionChoice"]
    assert "prompt_logprobs" not in choice.get("required", ())
