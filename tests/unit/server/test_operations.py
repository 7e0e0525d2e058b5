"""The operators' routes and layers over the real asynchronous engine."""

import asyncio
import json

import pytest
from support.operated import COMPLETIONS, Operated, run

from qinfer.server.auth import parse_keys
from qinfer.server.jsonlog import JsonLog

KEY = "correct-horse-battery"


def bearer(key=KEY):
    return {"Authorization": f"Bearer {key}"}


def test_ready_and_version(tokenizer):
    async def check(server: Operated) -> None:
        assert (await server.http.get("/ready")).json() == {"status": "ready", "reason": None}
        assert set((await server.http.get("/version")).json()) == {"version", "uptime"}

    run(tokenizer, check)


def test_s10_while_it_drains_work_is_refused_and_operators_are_answered(tokenizer):
    async def check(server: Operated) -> None:
        life = server.app.state.lifecycle
        running = asyncio.create_task(server.complete(100))
        while life.in_work == 0:
            await asyncio.sleep(0)
        life.draining = True
        refused = await server.complete()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "unavailable"
        assert refused.headers["connection"] == "close"
        assert "retry-after" in refused.headers
        ready = await server.http.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        for path in ("/health", "/metrics", "/version", "/v1/qinfer/stats"):
            assert (await server.http.get(path)).status_code == 200
        assert (await running).json()["usage"]["completion_tokens"] == 100
        assert life.in_work == 0

    run(tokenizer, check)


def test_s10_a_failed_engine_turns_health_and_readiness_red(tokenizer, monkeypatch):
    async def check(server: Operated) -> None:
        def fail():
            raise MemoryError("no memory left")

        monkeypatch.setattr(server.engine._core, "step", fail)
        assert (await server.complete()).status_code == 500
        for path in ("/health", "/ready"):
            response = await server.http.get(path)
            assert response.status_code == 503
            assert response.json()["status"] == "failed"
            assert "no memory left" in response.json()["reason"]
        assert (await server.complete()).status_code == 503
        assert (
            'qinfer:engine_healthy{model_name="m"} 0.0' in (await server.http.get("/metrics")).text
        )

    run(tokenizer, check)


def test_more_requests_than_wanted_are_told_to_come_back(tokenizer):
    async def check(server: Operated) -> None:
        running = [asyncio.create_task(server.complete(50)) for _ in range(2)]
        while server.app.state.lifecycle.in_work < 2:
            await asyncio.sleep(0)
        refused = await server.complete()
        assert refused.status_code in {429, 503}
        assert refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        assert (await server.http.get("/health")).status_code == 200
        assert [(await task).status_code for task in running] == [200, 200]
        assert (await server.complete()).status_code == 200

    run(tokenizer, check, max_concurrent_requests=2)


ORIGIN = {"Origin": "https://example.org"}
PREFLIGHT = ORIGIN | {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
ALLOWED = "access-control-allow-origin"


def test_cors_is_off_unless_asked_for(tokenizer):
    async def check(server: Operated) -> None:
        assert ALLOWED not in (await server.http.get("/v1/models", headers=ORIGIN)).headers
        assert (await server.http.options(COMPLETIONS, headers=PREFLIGHT)).status_code == 405

    run(tokenizer, check)


@pytest.mark.parametrize(
    ("origins", "allowed"), [(("https://example.org",), True), (("https://a",), False)]
)
def test_cors_names_its_origins_and_never_gives_credentials(tokenizer, origins, allowed):
    async def check(server: Operated) -> None:
        preflight = await server.http.options(COMPLETIONS, headers=PREFLIGHT)  # brings no key
        answer = await server.http.get("/v1/models", headers=ORIGIN | bearer())
        refused = await server.http.get("/v1/models", headers=ORIGIN)
        assert refused.status_code == 401
        assert preflight.status_code == (200 if allowed else 400)
        for response in (preflight, answer, refused):
            assert (response.headers.get(ALLOWED) == ORIGIN["Origin"]) is allowed
            assert "access-control-allow-credentials" not in response.headers

    run(tokenizer, check, cors_origins=origins, keys=parse_keys([KEY], "test"))


def logged(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_request_log_says_what_happened_and_not_what_was_said(tokenizer, tmp_path):
    path, audit = tmp_path / "requests", tmp_path / "audit"
    logs = {"request_log": JsonLog(str(path)), "audit_log": JsonLog(str(audit))}

    async def check(server: Operated) -> None:
        headers = bearer() | {"X-Request-Id": "mine-1"}
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, "n": 2}
        await server.http.post(COMPLETIONS, json=body, headers=headers)
        await server.http.post(COMPLETIONS, json=body | {"stream": True}, headers=headers)
        await server.http.post(COMPLETIONS, json={"prompt": "a secret"}, headers=bearer("wrong"))
        await server.http.get("/v1/nope?key=secret", headers=bearer())
        for log in logs.values():
            log.close()

    run(tokenizer, check, keys=parse_keys([f"alice {KEY}"], "test"), **logs)
    whole, streamed, refused, unknown = logged(path)
    for entry in (whole, streamed):
        assert entry["event"] == "request"
        assert (entry["status"], entry["complete"], entry["key"]) == (200, True, "alice")
        assert (entry["route"], entry["method"]) == (COMPLETIONS, "POST")
        assert entry["request_id"] == "mine-1"
        assert entry["response_id"].startswith("cmpl-")
        assert (entry["prompt_tokens"], entry["completion_tokens"]) == (3, 8)
        assert entry["finish_reasons"] == ["length", "length"]
        assert 0 <= entry["queue_seconds"] <= entry["ttft_seconds"] <= entry["seconds"]
        assert entry["client"].startswith("127.0.0.1:")
    assert (refused["status"], refused["key"]) == (401, None)
    assert "response_id" not in refused
    assert (unknown["status"], unknown["route"], unknown["path"]) == (404, "(none)", "/v1/nope")
    assert [(e["event"], e["path"]) for e in logged(audit)] == [("refused", COMPLETIONS)]
    everything = path.read_text() + audit.read_text()
    assert "secret" not in everything
    assert KEY not in everything
    assert "wrong" not in everything


def test_prompts_are_logged_if_asked_for(tokenizer, tmp_path):
    log = JsonLog(str(tmp_path / "log"))

    async def check(server: Operated) -> None:
        await server.complete(2)
        await server.http.post(COMPLETIONS, content=b"{no json \xff")
        log.close()

    run(tokenizer, check, request_log=log, log_prompts=True)
    good, bad = logged(tmp_path / "log")
    assert good["body"]["prompt"] == [1, 2, 3]
    assert bad["body"] == "{no json \\xff"


def test_what_nobody_expected_is_an_answer_and_is_logged(tokenizer, tmp_path, monkeypatch, caplog):
    log = JsonLog(str(tmp_path / "log"))

    async def check(server: Operated) -> None:
        def fail(*_arguments):
            raise ZeroDivisionError("a bug, with a secret")

        monkeypatch.setattr(type(server.engine), "stats", fail)
        response = await server.http.get("/v1/qinfer/stats")
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "secret" not in response.text
        log.close()

    run(tokenizer, check, request_log=log)
    assert [entry["status"] for entry in logged(tmp_path / "log")] == [500]
    assert "a bug" in caplog.text
