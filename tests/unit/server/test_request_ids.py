"""`X-Request-Id` on every answer."""

import pytest

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("method", "path", "options"),
    [
        ("GET", "/health", {}),
        ("GET", "/nothing", {}),
        ("PUT", COMPLETIONS, {}),
        ("POST", COMPLETIONS, {"json": {"prompt": "a"}}),
        ("POST", COMPLETIONS, {"json": {"prompt": "a", "stream": True}}),
        ("POST", COMPLETIONS, {"json": {"prompt": 1}}),
        ("POST", COMPLETIONS, {"content": b"x" * 5_000_000}),
        ("POST", "/v1/embeddings", {"json": {}}),
    ],
)
def test_the_clients_id_comes_back(call, method, path, options):
    headers = options.pop("headers", {}) | {"X-Request-Id": "abc-1.2:3"}
    assert call(method, path, headers=headers, **options).headers["x-request-id"] == "abc-1.2:3"


def test_also_on_what_nobody_expected(call, engine):
    engine.refusal = RuntimeError("secret")
    headers = {"X-Request-Id": "here"}
    response = call("POST", COMPLETIONS, json={"prompt": "a"}, headers=headers)
    assert (response.status_code, response.headers["x-request-id"]) == (500, "here")


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\x01b", "é"])
def test_others_are_replaced(call, given):
    headers = {"X-Request-Id": given.encode("latin-1")}
    found = call("GET", "/health", headers=headers).headers["x-request-id"]
    assert found != given
    assert found.isalnum()
