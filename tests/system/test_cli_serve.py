"""`qinfer serve` as a process of its own: start, one line, SIGTERM; and its dry run."""

import json
import re
import shutil
import signal
import socket

import httpx
import pytest
from click.testing import CliRunner
from fastapi.testclient import TestClient
from support.checkpoints import edit_json
from support.server_process import DEADLINE_SECONDS, serving

from qinfer.cli.main import cli
from qinfer.errors import ConfigError


def test_s10_sigterm_in_mid_stream(script_model):
    arguments = ("--served-model-name", "abc", "--kv-cache-dtype", "int8")
    with serving(script_model, *arguments) as served:
        process, url = served.process, served.url
        for part in (
            "serving abc at http://127.0.0.1:",
            r"weights [\d.]+ MB, int8 KV for [\d,]+ tokens, largest context 512, ",
            r"32 requests at once",
            r"sampling temperature 1, top_k 0",
            "no API keys, no TLS",
        ):
            assert re.search(part, served.line)
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            chunks = response.iter_lines()
            next(chunks)
            process.send_signal(signal.SIGTERM)
            rest = [chunk for chunk in chunks if chunk]
        assert rest[-1] == "data: [DONE]"
        assert (
            json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        )
        assert process.wait(DEADLINE_SECONDS) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        assert served.before + served.rest() == ""  # a quiet log


def run(*arguments):
    result = CliRunner().invoke(cli, ["serve", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_dry_run_shows_kernels_memory_and_limits(script_model):
    result = run(script_model, "--dry-run", "--kv-cache-dtype", "int8", "--max-model-len", 64)
    assert result.exit_code == 0
    for text in ("Kernels", "attention", "Memory", "  head", "Limits", "64 tokens", "int8"):
        assert text in result.stdout


def test_the_memory_of_a_draft_model_is_shown(script_model, monkeypatch):
    drafted = ("--speculative", script_model)
    assert "draft model and its cache" in run(script_model, "--dry-run", *drafted).stdout
    assert "draft model" not in run(script_model, "--dry-run").stdout
    plan = json.loads(run(script_model, "--dry-run", "--json", *drafted).stdout)
    seen = {}

    def look(app, sock, settings, *, on_ready):
        seen.update(TestClient(app).get("/v1/qinfer/stats").json()["memory"])

    monkeypatch.setattr("qinfer.cli.serve.serve", look)
    assert run(script_model, "--port", 0, *drafted).exit_code == 0
    assert seen["draft_bytes"] == plan["memory"]["draft_bytes"] > seen["weights_bytes"]


def test_dry_run_as_json(script_model):
    plan = json.loads(run(script_model, "--dry-run", "--json", "--max-num-seqs", 2).stdout)
    assert (plan["kind"], plan["format_version"]) == ("serve_plan", 1)
    assert plan["limits"]["max_model_len"] == 512
    assert plan["limits"]["full_length_sequences"] == 2
    assert plan["memory"]["kv_bytes_per_token"] == 2 * 1 * 2 * 72 * 4
    assert all(row["kernel"] for row in plan["kernels"])
    assert run(script_model, "--json").exit_code == 2


def test_a_taken_port_ends_the_start_before_the_model_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot bind"):
            run("/there/is/no/model", "--port", taken.getsockname()[1])


def test_s11_a_template_with_a_syntax_error_ends_the_start(script_model, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for %}")
    with pytest.raises(ConfigError, match="does not parse"):
        run(script_model, "--dry-run", "--chat-template", template)


def ready_at_once(app, sock, settings, *, on_ready):
    """Stand in for serving: tell that it is ready, and return."""
    on_ready()


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_an_open_address_is_warned_about(script_model, monkeypatch, host, warns):
    monkeypatch.setattr("qinfer.cli.serve.serve", ready_at_once)
    result = run(script_model, "--host", host, "--port", 0)
    assert "serving" in result.stderr
    for missing in ("no authentication", "no encryption"):
        assert (missing in result.stderr) is warns


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ssl-keyfile", "key.pem"], "needs --ssl-certfile"),
        (["--ssl-certfile", "none.pem"], "--ssl-certfile none.pem is no file"),
        (["--api-key-file", "none"], "cannot be read"),
        (["--log-prompts"], "needs --request-log"),
        (["--request-log", "/proc/none"], "cannot be written"),
        (["--cors-origin", "example.org"], "is no origin"),
        (["--cors-origin", "https://example.org/"], "is no origin"),
        (["--audit-log", "no/such/folder"], "is no folder"),
        (["--drain-timeout", "-1"], "not in the range"),
    ],
)
def test_mistakes_show_before_the_model_is_loaded(arguments, message):
    try:
        result = run("/there/is/no/model", "--port", 0, *arguments)
    except ConfigError as error:
        text = str(error)
    else:
        assert result.exit_code == 2
        text = " ".join(result.stderr.split())
    assert message in text


def test_e06_defaults_of_the_model_are_told_at_the_start(script_model, tmp_path, monkeypatch):
    monkeypatch.setattr("qinfer.cli.serve.serve", ready_at_once)
    model = shutil.copytree(script_model, tmp_path / "model")
    edit_json(model / "generation_config.json", temperature=0.6, top_k=1)
    assert "sampling temperature 0.6, top_k 1" in " ".join(run(model, "--port", 0).stderr.split())
    plan = json.loads(run(model, "--dry-run", "--json").stdout)
    assert plan["sampling_defaults"]["temperature"] == 0.6
