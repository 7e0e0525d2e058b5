"""S09: numbers that add up with what clients count themselves."""

import asyncio
import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.operated import COMPLETIONS, Operated, run

from qinfer.server.jsonlog import JsonLog

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "qinfer.json"


async def scrape(server: Operated) -> dict[str, float]:
    """Return samples by name, with the labels that tell them apart."""
    response = await server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation or family.name.startswith(("process_", "python_"))
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            name = sample.name + ("" if not labels else json.dumps(labels, sort_keys=True))
            samples[name] = sample.value
    return samples


def ended(reason):
    return f'qinfer:request_success_total{{"finished_reason": "{reason}"}}'


def posts(status):
    labels = {"method": "POST", "route": COMPLETIONS, "status": str(status)}
    return f"qinfer:http_requests_total{json.dumps(labels)}"


async def disconnect_after_first_chunk(server: Operated) -> None:
    """Ask for a long stream, and leave when it has begun."""
    body = json.dumps({"prompt": [7, 8], "max_tokens": 120, "ignore_eos": True, "stream": True})
    begun = asyncio.Event()
    sent_body = False

    async def receive():
        nonlocal sent_body
        if not sent_body:
            sent_body = True
            return {"type": "http.request", "body": body.encode(), "more_body": False}
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.body":
            begun.set()

    scope = {
        "type": "http",
        "http_version": "1.1",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": COMPLETIONS,
        "raw_path": COMPLETIONS.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }
    await server.app(scope, receive, send)


def test_s09_counts_are_the_clients_own(tokenizer):
    """Ten requests, two left by their clients, one refused."""

    async def check(server: Operated) -> None:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        answers = [(await server.complete(tokens)).json() for tokens in (1, 2, 3, 4, 5, 6, 7)]
        spent = loop.time() - begin
        for _ in range(2):
            await disconnect_after_first_chunk(server)
        assert (await server.complete(tokens=500)).status_code == 400
        while server.engine.stats().running:
            await asyncio.sleep(0.001)
        seen = await scrape(server)
        tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
        assert tokens == 28

        assert seen[ended("length")] == 7
        assert seen[ended("abort")] == 2
        assert seen[ended("stop")] == seen[ended("error")] == 0
        assert seen["qinfer:time_to_first_token_seconds_count"] == 7 + 2  # those with a token
        assert seen["qinfer:e2e_request_latency_seconds_count"] == 7
        assert seen["qinfer:request_queue_time_seconds_count"] == 7
        assert seen["qinfer:request_generation_tokens_sum"] == tokens
        assert seen["qinfer:request_prompt_tokens_sum"] == 3 * 7
        assert seen["qinfer:time_per_output_token_seconds_count"] == 6  # all but the single token
        assert seen["qinfer:prompt_tokens_total"] == 3 * 7 + 2 * 2
        generated = seen["qinfer:generation_tokens_total"]
        assert tokens + 2 <= generated < tokens + 2 * 120
        # Each token but a sequence's first came some time after another; what was still on its
        # way when a client left is generated, but delivered to nobody.
        assert tokens - 7 <= seen["qinfer:inter_token_latency_seconds_count"] <= generated - 9
        assert seen[posts(200)] == 7 + 2
        assert seen[posts(400)] == 1
        assert 0 < seen["qinfer:e2e_request_latency_seconds_sum"] <= spent
        assert (
            0
            < seen["qinfer:request_queue_time_seconds_sum"]
            <= seen["qinfer:time_to_first_token_seconds_sum"]
        )
        assert seen["qinfer:num_requests_running"] == seen["qinfer:num_requests_waiting"] == 0
        assert seen["qinfer:kv_cache_usage_perc"] == 0

    run(tokenizer, check)


def test_samples_count_as_sequences_and_preemptions_show(tokenizer):
    async def check(server: Operated) -> None:
        answers = await asyncio.gather(*(server.complete(24, n=2) for _ in range(3)))
        assert all(answer.status_code == 200 for answer in answers)
        seen = await scrape(server)
        assert seen[ended("length")] == 6
        assert seen["qinfer:request_generation_tokens_sum"] == 6 * 24
        assert seen["qinfer:generation_tokens_total"] == 6 * 24
        assert seen["qinfer:num_preemptions_total"] > 0
        assert seen["qinfer:prefix_cache_queries_total"] >= seen["qinfer:prefix_cache_hits_total"]

    run(tokenizer, check, core={"num_blocks": 16, "max_running": 6})


def test_histograms_are_cumulative(tokenizer):
    async def check(server: Operated) -> None:
        await server.complete(20)
        text = (await server.http.get("/metrics")).text
        families = list(text_string_to_metric_families(text))
        histograms = [family for family in families if family.type == "histogram"]
        assert "qinfer:time_to_first_token_seconds" in {family.name for family in histograms}
        for family in histograms:
            buckets = [s.value for s in family.samples if s.name.endswith("_bucket")]
            count = next(s.value for s in family.samples if s.name.endswith("_count"))
            assert buckets == sorted(buckets)
            assert buckets[-1] == count

    run(tokenizer, check)


def test_the_live_view_shows_the_same_numbers(tokenizer):
    async def check(server: Operated) -> None:
        await asyncio.gather(*(server.complete(5) for _ in range(3)))
        stats = (await server.http.get("/v1/qinfer/stats")).json()
        seen = await scrape(server)
        engine = stats["engine"]
        assert stats["server"]["state"] == "ready"
        assert stats["server"]["models"] == ["m"]
        assert engine["ended"] == {"length": 3}
        assert engine["generation_tokens"] == seen["qinfer:generation_tokens_total"] == 15
        assert stats["memory"]["weights_bytes"] == 7
        assert stats["limits"]["max_num_seqs"] == 4
        for name in ("ttft", "tpot", "itl", "e2e", "queue"):
            assert len(stats[name]["counts"]) == len(stats[name]["bounds"]) + 1
        assert sum(stats["ttft"]["counts"]) == 3
        assert seen['qinfer:memory_bytes{"kind": "weights_bytes"}'] == 7

    run(tokenizer, check, memory={"weights_bytes": 7}, limits={"max_num_seqs": 4})


def test_a_full_disk_shows_in_the_metrics(tokenizer):
    log = JsonLog("/dev/full")

    async def check(server: Operated) -> None:
        for _ in range(3):
            assert (await server.complete(1)).status_code == 200
        log.close()
        seen = await scrape(server)
        assert seen['qinfer:log_lines_total{"fate": "dropped", "log": "request"}'] == 3
        assert seen['qinfer:log_lines_total{"fate": "written", "log": "request"}'] == 0

    run(tokenizer, check, request_log=log)


def test_routes_of_metrics_stay_few(tokenizer):
    async def check(server: Operated) -> None:
        for number in range(5):
            await server.http.get(f"/v1/models/{number}")
            await server.http.post(f"/scan/{number}")
            await server.http.request("BREW", f"/coffee/{number}")
        seen = [name for name in await scrape(server) if name.startswith("qinfer:http_requests_t")]
        assert len(seen) == 3

    run(tokenizer, check)


@pytest.mark.parametrize("part", ["expr"])
def test_the_dashboard_asks_for_metrics_that_there_are(tokenizer, part):
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target[part] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 10

    async def check(server: Operated) -> None:
        await server.complete(3)
        names = {name.partition("{")[0] for name in await scrape(server)}
        for query in queries:
            asked = {word for word in words(query) if word.startswith(("qinfer:", "process_"))}
            assert asked, query
            assert asked <= names, asked - names

    log = JsonLog("/dev/null")
    run(tokenizer, check, memory={"weights_bytes": 1}, request_log=log)
    log.close()


def words(query):
    return "".join(c if c.isalnum() or c in "_:" else " " for c in query).split()
