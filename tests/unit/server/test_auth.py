"""Who may call, and that nobody else can."""

import stat

import pytest
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Route
from support.operated import Operated, run

from qinfer.errors import ConfigError
from qinfer.server.auth import (
    OPEN_PATHS,
    is_open,
    parse_keys,
    read_keys,
    readable_by_others,
)
from qinfer.server.page import ASSET_PREFIX

KEY, OTHER = "correct-horse-battery", "staple-staple-staple"
RING = parse_keys([f"alice {KEY}", OTHER], "test")


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_s08_every_route_asks_for_a_key_but_those_that_are_listed(tokenizer):
    """The route table is walked, so that a route added later cannot be forgotten."""

    async def check(server: Operated) -> None:
        routes = [route for route in server.app.routes if isinstance(route, APIRoute | Route)]
        paths = {route.path: route.methods or {"GET"} for route in routes}
        assert {"/metrics", "/openapi.json", "/v1/qinfer/stats", "/v1/models", "/version"} <= set(
            paths
        )
        asked = 0
        for path, methods in paths.items():
            for method in {*methods, "POST", "OPTIONS"}:
                for key in (None, "wrong", KEY[:-1], KEY + "x"):
                    headers = {} if key is None else bearer(key)
                    response = await server.http.request(method, path, headers=headers)
                    is_open = path in OPEN_PATHS or path.startswith(ASSET_PREFIX)
                    assert (response.status_code == 401) is not is_open, (method, path)
                    asked += not is_open
        assert asked > 20
        assert (await server.http.get("/nope")).status_code == 401

    run(tokenizer, check, keys=RING)


@pytest.mark.parametrize(
    "path", ["/health/", "//health", "/HEALTH", "", "/web", "/web/../metrics", "/x/web/a", "/v1"]
)
def test_s08_paths_that_look_open_are_not(path):
    assert not is_open({"type": "http", "path": path})
    assert not is_open({"type": "websocket", "path": "/health"})


def test_s08_refusals_have_openais_shape(tokenizer):
    async def check(server: Operated) -> None:
        for headers in ({}, bearer("wrong"), {"Authorization": "Basic abc"}, bearer("")):
            response = await server.http.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"].startswith("Bearer")
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"] == "invalid_api_key"
            assert "wrong" not in response.text  # a key typed wrong is still half a key

    run(tokenizer, check, keys=RING)


def test_each_key_of_several_opens(tokenizer):
    async def check(server: Operated) -> None:
        for key in (KEY, OTHER):
            for scheme in ("Bearer", "bearer"):
                headers = {"Authorization": f"{scheme} {key}"}
                assert (await server.http.get("/v1/models", headers=headers)).status_code == 200
        twice = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer wrong")]
        assert (await server.http.get("/v1/models", headers=twice)).status_code == 401
        for path in OPEN_PATHS:
            assert (await server.http.get(path)).status_code == 200

    run(tokenizer, check, keys=RING)


def test_without_keys_everything_is_open(tokenizer):
    async def check(server: Operated) -> None:
        assert (await server.http.get("/v1/models")).status_code == 200
        headers = bearer("anything")
        assert (await server.http.get("/metrics", headers=headers)).status_code == 200

    run(tokenizer, check)


def test_keys_are_named_by_their_file_or_their_digest():
    ring = parse_keys(["# staff", "", f"alice {KEY}", f"  {OTHER}  ", "short"], "test")
    digest = ring.keys[1].digest.hex()
    assert [key.name for key in ring.keys[:2]] == ["alice", f"key-{digest[:8]}"]
    assert [key.short for key in ring.keys] == [False, False, True]
    assert KEY not in repr(ring)
    found = ring.find(KEY)
    assert found is not None
    assert found.name == "alice"
    assert ring.find(KEY + "x") is None
    assert ring.find("") is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no API key"),
        (["# nothing"], "holds no API key"),
        (["a b c"], "line 1: write KEY, or NAME KEY"),
        (["ok-ok-ok-ok-ok-ok", "schlüssel"], "line 2: write KEY"),
        (["na/me secret-secret-secret"], "the key's name"),
        (["one secret-secret", "two secret-secret"], "line 2: this key"),
        (["one secret-secret", "one other-secret"], "line 2: this key"),
    ],
)
def test_lists_that_are_no_keys_are_refused_without_showing_them(lines, message):
    with pytest.raises(ConfigError, match=message) as refused:
        parse_keys(lines, "test")
    assert "secret" not in str(refused.value)


@given(st.lists(st.text(), max_size=5))
def test_any_text_is_either_keys_or_refused(lines):
    try:
        ring = parse_keys(lines, "test")
    except ConfigError:
        return
    for key in ring.keys:
        assert any(ring.find(line.split()[-1]) == key for line in lines if line.split())


def test_key_files(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"alice {KEY}\n")
    path.chmod(0o600)
    assert [key.name for key in read_keys(path).keys] == ["alice"]
    assert not readable_by_others(path)
    path.chmod(0o600 | stat.S_IROTH)
    assert readable_by_others(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(path)
