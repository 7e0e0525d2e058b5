"""`qinfer generate`, `chat` and `bench` as a user types them, on a model with a known answer."""

import json

import pytest
from click.testing import CliRunner

from qinfer.cli.main import cli
from qinfer.errors import ConfigError, MethodMismatchError, RequestError

TEXT = "ABCDEFGHIJK"


def run(*arguments, **options):
    """Run the command line in this process; unexpected errors fail the test."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_generate_prints_the_text(script_model):
    assert run("generate", script_model, "hello", "--temperature", 0).stdout == TEXT + "\n"


def test_generate_reads_standard_input(script_model):
    result = run("generate", script_model, "--temperature", 0, "--max-tokens", 3, input="hello")
    assert result.stdout == "ABC\n"


def test_generate_json(script_model):
    arguments = ("generate", script_model, "hi", "--temperature", 0, "--stop", "EF", "--json")
    result = json.loads(run(*arguments).stdout)
    assert (result["kind"], result["format_version"]) == ("generation", 1)
    assert (result["text"], result["finish_reason"]) == ("ABCD", "stop")
    assert result["prompt_token_ids"] == [104, 105]
    assert result["metrics"]["ttft"] > 0


def test_generate_gives_what_there_is_room_for_unless_told_otherwise(script_model):
    arguments = ("generate", script_model, "x" * 60, "--max-model-len", 64, "--ignore-eos")
    assert json.loads(run(*arguments, "--json").stdout)["finish_reason"] == "length"
    with pytest.raises(RequestError, match="128 more are requested"):
        run(*arguments, "--max-tokens", 128)


def test_generate_refuses_what_cannot_work(script_model):
    with pytest.raises(RequestError, match="temperature"):
        run("generate", script_model, "hi", "--temperature", -1)
    with pytest.raises(RequestError, match="600 tokens"):
        run("generate", script_model, "x" * 600)
    with pytest.raises(ConfigError, match="max_model_len"):
        run("generate", script_model, "hi", "--max-model-len", 10_000)
    assert run("generate", script_model, "hi", "--kv-cache-dtype", "int3").exit_code == 2


def test_chat_keeps_a_history_and_forgets_it_on_request(script_model):
    lines = ["hello", "", "again", "/what", "/reset", "once more", "/exit", "never"]
    result = run("chat", script_model, "--temperature", 0, input="\n".join(lines))
    assert result.exit_code == 0
    assert result.stdout.count(TEXT) == 3
    assert "the conversation is forgotten" in result.stderr
    assert "/exit ends" in result.stderr


def test_chat_says_when_the_context_is_full(script_model):
    lines = "x" * 600 + "\nshort\n"
    result = run("chat", script_model, "--temperature", 0, input=lines)
    assert result.exit_code == 0  # the end of input is an exit
    assert "/reset starts anew" in result.stderr
    assert result.stdout.strip() == TEXT


def test_chat_sets_parameters_and_says_what_is_wrong_with_them(script_model):
    lines = [
        *("/set", "/set max_tokens 3", "hello", "/set max_tokens none", "hello"),
        *("/set temperature hot", "/set nonsense 1", '/set stop ["DE"]', "hello", "/exit"),
    ]
    result = run("chat", script_model, "--temperature", 0, input="\n".join(lines))
    assert [line for line in result.stdout.splitlines() if line] == ["ABC", TEXT, "ABC"]
    assert "temperature 0" in result.stderr
    assert "max_tokens 3" in result.stderr
    assert "there is no nonsense" in result.stderr
    assert 'stop ["DE"]' in result.stderr


def test_chat_retries_takes_back_and_saves(script_model, tmp_path):
    file = tmp_path / "talk.json"
    lines = [
        *("/retry", "one", "/retry", "two", "/undo", f"/save {file}", "/save"),
        *(f"/save {tmp_path / 'no/where.json'}", "/system be brief", "three", "/stats"),
    ]
    result = run("chat", script_model, "--temperature", 0, input="\n".join(lines))
    assert result.exit_code == 0
    talk = json.loads(file.read_text(encoding="utf-8"))["messages"]
    assert talk == [{"role": "user", "content": "one"}, {"role": "assistant", "content": TEXT}]
    assert result.stdout.count(TEXT) == 4
    for remark in ("there is no message yet", "2 messages are left", "say where", "cannot write"):
        assert remark in result.stderr
    assert "tokens/s" in result.stderr
    assert "conversation: 2 messages" in result.stderr


def test_chat_takes_a_template_and_a_system_message(script_model, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ messages | length }}{{ raise_exception('no') if messages[1:] else '' }}"
    )
    arguments = ("chat", script_model, "--chat-template", template, "--temperature", 0)
    assert run(*arguments, input="hi\n").stdout.strip() == TEXT
    refused = run(*arguments, "--system", "be brief", input="hi\n")
    assert "refuses these messages: no" in refused.stderr
    template.write_text("{% if %}")
    with pytest.raises(ConfigError, match="does not parse"):
        run(*arguments, input="hi\n")


def test_bench_refuses_a_missing_folder_before_it_measures(tmp_path):
    result = run("bench", "no-model", "--json", tmp_path / "none/bench.json")
    assert result.exit_code == 2
    assert "is no folder" in result.stderr


def test_bench_writes_a_record_and_compares_with_one(tiny_llama, tmp_path):
    file = tmp_path / "bench.json"
    arguments = [
        *("bench", tiny_llama, "--input-len", 8, "--output-len", 4, "--concurrency", "1,2"),
        *("--num-requests", 3, "--threads", 1),
    ]
    first = run(*arguments, "--kv-cache-dtype", "int8", "--json", file)
    assert "fewer than 100 samples" in first.stdout
    record = json.loads(file.read_text())
    assert record["kv_cache_dtype"] == "int8"
    assert [row["num_requests"] for row in record["rows"]] == [3, 4]
    assert record["rows"][0]["ttft_seconds"]["p99_reliable"] is False
    assert "not measured" in record["method"]["warmup"]
    compared = run(*arguments, "--kv-cache-dtype", "fp32", "--compare", file)
    assert "against" in compared.stdout
    drafted = run(*arguments, "--speculative", "ngram", "--compare", file)
    assert "Speculative decoding with ngram, up to 4 tokens" in drafted.stdout
    with pytest.raises(MethodMismatchError, match="seed"):
        run(*arguments, "--compare", file, "--seed", 5)
