"""What operators rely on: stops, crashes, restarts, keys, TLS, logs; on real processes."""

import json
import signal
import ssl
from pathlib import Path

import httpx
import pytest
from support.live import TLS_FILES
from support.server_process import BREAKING, DEADLINE_SECONDS, SLOW, serving

LONG = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
KEY = "correct-horse-battery-staple"


def events(chunks):
    return [chunk.removeprefix("data: ") for chunk in chunks if chunk]


def test_s10_a_drain_refuses_new_work_and_is_cut_off_in_time(script_model, tmp_path):
    audit = tmp_path / "audit"
    arguments = ("--drain-timeout", "1", "--audit-log", str(audit))
    with serving(script_model, *arguments, prepare=SLOW) as served:
        url, process = served.url, served.process
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as response:
            chunks = response.iter_lines()
            next(chunks)
            process.send_signal(signal.SIGTERM)
            # Still there for whoever asks, but not for work.
            while (ready := httpx.get(f"{url}/ready")).status_code == 200:
                pass
            assert ready.json()["status"] == "draining"
            refused = httpx.post(f"{url}/v1/completions", json={"prompt": "y"})
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert httpx.get(f"{url}/health").status_code == 200
            *_, error, done = events(chunks)
        assert done == "[DONE]"
        assert "the server is stopping" in json.loads(error)["error"]["message"]
        assert process.wait(DEADLINE_SECONDS) == 0
        assert "1 requests did not end in time" in served.rest()
    entries = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [entry["event"] for entry in entries] == ["start", "stop"]


def test_s10_a_second_signal_ends_at_once(script_model):
    with serving(script_model, prepare=SLOW) as served:
        url = f"{served.url}/v1/completions"
        with httpx.stream("POST", url, json=LONG, timeout=60) as response:
            chunks = response.iter_lines()
            next(chunks)
            served.process.send_signal(signal.SIGTERM)
            while httpx.get(f"{served.url}/ready").status_code == 200:
                pass
            served.process.send_signal(signal.SIGINT)
            assert served.process.wait(DEADLINE_SECONDS) == 128 + signal.SIGINT
            with pytest.raises(httpx.RemoteProtocolError):
                list(chunks)  # cut off, and not ended as if it were whole


def test_s10_a_failed_engine_ends_the_process_if_asked(script_model, tmp_path):
    audit = tmp_path / "audit"
    arguments = ("--exit-on-failure", "--audit-log", str(audit))
    with serving(script_model, *arguments, prepare=BREAKING) as served:
        url = f"{served.url}/v1/completions"
        with httpx.stream("POST", url, json=LONG, timeout=60) as response:
            *_, error, done = events(response.iter_lines())
        assert "no memory left" in json.loads(error)["error"]["message"]
        assert done == "[DONE]"
        assert served.process.wait(DEADLINE_SECONDS) == 1
        assert "stopped, since the engine has failed: MemoryError" in served.rest()
    entries = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [entry["event"] for entry in entries] == ["start", "failure", "stop"]


def test_kill_9_and_start_again(script_model, tmp_path):
    """What was running is lost and its clients see that; the same address serves again."""
    log, path = tmp_path / "log", tmp_path / "socket"
    arguments = ("--uds", str(path), "--request-log", str(log))
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://test", timeout=60) as client:
        with serving(script_model, *arguments, prepare=SLOW) as served:
            assert served.url == f"http+unix://{path}"
            client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            with client.stream("POST", "/v1/completions", json=LONG) as response:
                chunks = response.iter_lines()
                next(chunks)
                served.process.kill()
                with pytest.raises(httpx.RemoteProtocolError):
                    list(chunks)
        assert path.exists()  # nobody was left to remove it
        with serving(script_model, *arguments) as served:
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(DEADLINE_SECONDS) == 0
    assert not path.exists()
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["status"] for entry in entries] == [200, 200]


def test_keys_tls_and_a_full_disk(script_model, tmp_path):
    """S08 over the wire; keys show nowhere; a log on a full disk costs its lines only."""
    keys, audit = tmp_path / "keys", tmp_path / "audit"
    keys.write_text(f"alice {KEY}\n")
    keys.chmod(0o644)
    second = "another-key-from-the-environment"
    arguments = (
        *("--host", "0.0.0.0", "--api-key-file", str(keys)),
        *("--ssl-certfile", str(TLS_FILES / "server.crt")),
        *("--ssl-keyfile", str(TLS_FILES / "server.key")),
        *("--request-log", "/dev/full", "--audit-log", str(audit)),
    )
    context = ssl.create_default_context(cafile=TLS_FILES / "server.crt")
    environment = {"QINFER_API_KEYS": second}
    with serving(script_model, *arguments, environment=environment) as served:
        assert "2 API keys, TLS" in served.line
        assert "can be read by other users" in served.before
        assert "reached from other machines" not in served.before
        command = Path(f"/proc/{served.process.pid}/cmdline").read_bytes()
        assert KEY.encode() not in command
        url = served.url.replace("0.0.0.0", "127.0.0.1")
        with httpx.Client(verify=context, base_url=url) as client:
            assert client.get("/health").status_code == 200
            assert client.get("/metrics").status_code == 401
            for key in (KEY, second):
                headers = {"Authorization": f"Bearer {key}"}
                body = {"prompt": "x", "max_tokens": 2}
                for _ in range(3):
                    answer = client.post("/v1/completions", json=body, headers=headers)
                    assert answer.status_code == 200
            metrics = client.get("/metrics", headers=headers).text
        assert 'qinfer:log_lines_total{fate="written",log="request"} 0.0' in metrics
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(DEADLINE_SECONDS) == 0
        said = served.rest()
    assert said.count("its lines are dropped and counted") == 1
    everything = served.before + served.line + said + audit.read_text()
    assert KEY not in everything
    assert second not in everything
    entries = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [entry["event"] for entry in entries] == ["start", "refused", "stop"]
    assert entries[0]["keys"][0] == "alice"
