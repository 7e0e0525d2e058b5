"""OpenAI's other routes say what there is instead."""

import pytest


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/audio/speech"),
        ("POST", "/v1/images/generations"),
        ("POST", "/v1/moderations"),
        ("GET", "/v1/files"),
        ("DELETE", "/v1/files/file-1"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/chat/completions/chatcmpl-1"),
    ],
)
def test_known_routes_are_refused_in_words(call, method, path):
    response = call(method, path)
    assert response.status_code == 501
    error = response.json()["error"]
    assert error["code"] == "not_supported"
    assert "/v1/chat/completions" in error["message"]


def test_what_there_is_is_still_there(call):
    assert call("POST", "/v1/responses", json={"input": "hi"}).status_code == 200
    assert call("GET", "/v1/responses").status_code == 405
