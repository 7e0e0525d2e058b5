"""Clients that leave, ask for too much or send nonsense, against a real server."""

import asyncio
import json
import shutil
import socket

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json, write_tiny
from support.live import live_server, wait_for

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(tiny_llama):
    with live_server(tiny_llama, enable_prefix_caching=False) as live:
        yield live


def post(server, body, path=COMPLETIONS):
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def answers(server):
    """Check that a normal request is still answered."""
    response = post(server, {"prompt": "ok", "max_tokens": 2, "ignore_eos": True})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 2


def open_request(server, path=COMPLETIONS, **fields):
    """Send a long request over a raw socket and return the socket."""
    if path == COMPLETIONS:
        fields = {"prompt": "a", "max_tokens": 120, "ignore_eos": True} | fields
    body = json.dumps(fields).encode()
    raw = socket.create_connection(server.address, timeout=30)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    raw.sendall(head.encode() + body)
    return raw


@pytest.mark.parametrize("stream", [True, False])
def test_s01_clients_that_leave_are_aborted(server, stream):
    before = server.engine.stats()
    for _ in range(5):
        with open_request(server, stream=stream, n=4) as raw:
            if stream:
                assert raw.recv(100)
            else:
                wait_for(lambda: server.engine.stats().running > 0)
        server.wait_until_idle()
    after = server.engine.stats()
    aborted = after.finished.get("abort", 0) - before.finished.get("abort", 0)
    assert aborted == 5 * 4
    assert after.generation_tokens - before.generation_tokens < 5 * 4 * 119
    answers(server)


LONG_CHAT = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", LONG_CHAT),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "text"}}}),
        (COMPLETIONS, {"use_beam_search": True, "beam_width": 4}),
        (COMPLETIONS, {"echo": True, "logprobs": 5}),
        (COMPLETIONS, {"prompt": ["a", "b", "c"], "guided_regex": "[a-z ]{200,300}"}),
    ],
    ids=["chat", "responses", "beams", "echo", "structured"],
)
def test_s01_on_every_route(server, path, fields, stream):
    with open_request(server, path, **fields, stream=stream) as raw:
        if stream and "use_beam_search" not in fields:
            assert raw.recv(100)
        else:
            wait_for(lambda: server.engine.stats().running > 0)
    server.wait_until_idle()
    answers(server)


@pytest.mark.parametrize("sent", [0, 1, 100, -1])
def test_s01_clients_that_leave_in_the_middle_of_a_body(server, sent):
    """The last part has come, so it may begin to be read, compiled or tokenized."""
    before = server.engine.stats()
    schema = {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(900)}}
    body = json.dumps({"prompt": "x" * 200_000, "guided_json": schema}).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(server.address, timeout=30) as raw:
        raw.sendall(head.encode() + body[: len(body) if sent == -1 else sent])
    answers(server)
    server.wait_until_idle()
    assert server.engine.stats().prompt_tokens - before.prompt_tokens == 2  # "ok"


BAD_BODIES = [
    b"{",
    b"[]",
    b"\xff",
    b'{"prompt": "a", "stop": [""]}',
    b'{"prompt": [9999999]}',
    b'{"prompt": "a", "seed": 18446744073709551616}',
    b'{"prompt": "a", "guided_regex": "("}',
    b'{"prompt": "a", "guided_regex": "x", "allowed_token_ids": [65]}',
    b'{"prompt": "a", "logit_bias": {"999999": 1}}',
    b'{"prompt": "a", "max_tokens": 100000}',
    b'{"prompt": "a", "n": 65}',
    b'{"prompt": "' + b"x" * 5_000_000 + b'"}',
]


def test_one_bad_request_never_hurts_another(server):
    """S03, S04, S05: good requests get their own answers while bad ones come and go."""
    good = {"prompt": "abc", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    alone = post(server, good).json()["choices"][0]["text"]
    headers = {"content-type": "application/json"}

    async def go():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            bad = [client.post(COMPLETIONS, content=body, headers=headers) for body in BAD_BODIES]
            fine = [client.post(COMPLETIONS, json=good) for _ in range(6)]
            found = await asyncio.gather(*bad, *fine)
        return found[: len(bad)], found[len(bad) :]

    bad, fine = asyncio.run(go())
    assert [response.status_code for response in bad] == [400] * (len(BAD_BODIES) - 1) + [413]
    assert all(response.json()["error"]["type"] == "invalid_request_error" for response in bad)
    assert [response.json()["choices"][0]["text"] for response in fine] == [alone] * 6
    server.wait_until_idle()


def test_e17_cancelled_while_waiting(tiny_llama):
    with live_server(tiny_llama, max_num_seqs=1) as live:
        with open_request(live, n=1):
            wait_for(lambda: live.engine.stats().running == 1)
            with open_request(live):
                wait_for(lambda: live.engine.stats().waiting == 1)
            wait_for(lambda: live.engine.stats().waiting == 0)
            computed = live.engine.stats().prompt_tokens
        wait_for(lambda: live.engine.stats().running == 0)
        assert computed == 2
        assert live.engine.stats().generation_tokens < 240
        answers(live)


@pytest.mark.parametrize(
    "body",
    [{"prompt": []}, {"prompt": [[]]}, {"prompt": "a", "max_tokens": 0}, {"prompt": [288]}],
)
def test_e12_nothing_to_do_is_refused(server, body):
    assert post(server, body).status_code == 400
    answers(server)


def test_e12_empty_text_starts_from_bos(server):
    response = post(server, {"prompt": "", "max_tokens": 1, "ignore_eos": True})
    assert response.json()["usage"]["prompt_tokens"] == 1
    assert post(server, {"messages": []}, "/v1/chat/completions").status_code == 400


@pytest.mark.parametrize(
    ("length", "max_tokens", "produced"),
    [
        *[(127, None, 1), (127, 1, 1), (127, 64, None), (128, None, None), (128, 1, None)],
        *[(129, None, None), (64, 64, 64), (64, None, 64)],
    ],
)
def test_e13_context_limit(server, length, max_tokens, produced):
    body = {"prompt": [5] * length, "ignore_eos": True}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    response = post(server, body)
    if produced is None:
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["code"] == "context_length_exceeded"
        assert str(length) in error["message"]
        assert "128" in error["message"]
    else:
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert response.json()["usage"]["completion_tokens"] == produced


def test_e07_seeds(server):
    def sample(**fields):
        body = {"prompt": "a", "max_tokens": 8, "temperature": 1, "ignore_eos": True, **fields}
        response = post(server, body).json()
        return [choice["text"] for choice in response["choices"]]

    assert len({sample()[0] for _ in range(3)}) > 1
    four = sample(seed=7, n=4)
    assert len(set(four)) == 4
    assert sample(seed=7, n=4) == four


def test_s04_huge_bodies_are_refused(server):
    response = post(server, {"prompt": "x" * 20_000_000})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    answers(server)


def test_g06_overflow_is_an_error_in_float16_and_an_answer_in_bfloat16(tmp_path):
    path = write_tiny(tmp_path / "model")
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensor.mul_(50)
        if name.endswith("down_proj.weight"):
            tensor.fill_(6e4)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, file)
    with live_server(path, dtype="float16") as live:
        for fields in ({}, {"stream": True}):
            response = post(live, {"prompt": "abc", "max_tokens": 4, **fields})
            assert response.status_code == 500
            assert "float16" in response.json()["error"]["message"]
        assert httpx.get(f"{live.url}/health").status_code == 200
    with live_server(path, dtype="bfloat16") as live:
        answers(live)


def test_e06_the_request_wins_over_the_models_defaults(tiny_llama, tmp_path):
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    edit_json(model / "generation_config.json", top_k=1)
    body = {"prompt": "a", "max_tokens": 8, "ignore_eos": True, "temperature": 2}
    with live_server(model) as live:

        def texts(**fields):
            answers = [post(live, body | fields | {"seed": seed}).json() for seed in (1, 2)]
            return {answer["choices"][0]["text"] for answer in answers}

        assert len(texts()) == 1
        assert len(texts(top_k=0)) == 2


def test_a_dead_engine_answers_and_turns_health_red(tiny_llama, monkeypatch):
    with live_server(tiny_llama) as live:
        answers(live)

        def fail() -> None:
            raise MemoryError("no memory left")

        monkeypatch.setattr(live.engine._core, "step", fail)
        response = post(live, {"prompt": "a"})
        assert response.status_code == 500
        assert "no memory left" in response.json()["error"]["message"]
        assert post(live, {"prompt": "a", "stream": True}).status_code == 503
        health = httpx.get(f"{live.url}/health")
        assert health.status_code == 503
        assert "no memory left" in health.json()["reason"]
