"""What HTTP costs: throughput of 32 streams through `qinfer serve` against the offline engine.

    python benchmarks/server_overhead.py MODEL --quick    # does it run? the numbers are noise
    python benchmarks/server_overhead.py MODEL            # an idle machine, please

Server, offline engine and client are processes of their own on the same cores; both engines have
the same settings and get the same random prompts (fresh ones in every round, and no prefix
cache), greedy, EOS ignored. Rounds alternate which of the two goes first; each round gives a
ratio. The client's CPU time is part of what the server's side has to live with, so it is reported;
whoever runs it elsewhere gets that much back.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peers.machine import describe_machine, describe_qinfer
from records import free_files, write

HERE = Path(__file__).parent
TICKS = 100  # of /proc/PID/stat per second


class Child:
    """A process that answers a JSON line with a JSON line."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} ended early")
        result: dict[str, Any] = json.loads(line)
        return result

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.read()


class Server:
    """`qinfer serve` on a free port."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        command = [sys.executable, "-c", "from qinfer.cli.main import main; main()", "serve", model]
        for name, value in options.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                command.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                command += [f"--{flag}", str(value)]
        self.process = subprocess.Popen(
            [*command, "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        said = ""
        while (found := re.search(r"http://127\.0\.0\.1:(\d+)", said)) is None:
            line = self.process.stderr.readline()
            if not line:
                raise SystemExit(f"the server ended early: {said}")
            said += line
        self.port = int(found.group(1))

    def cpu_seconds(self) -> float:
        stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii")
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-cache-dtype", default="int8")
    parser.add_argument("--quick", action="store_true", help="one short round, no record")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--replace", action="store_true", help="overwrite today's record")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.output_len = 1, 16
    options = {
        "threads": arguments.threads,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "max_num_seqs": arguments.streams,
        "enable_prefix_caching": False,
        "memory": "4GiB",
    }
    rounds = measure(arguments, options)
    record = summary(arguments, options, rounds)
    page = page_of(record)
    print(page)
    if not arguments.quick:
        stem = f"{datetime.now(UTC):%Y-%m-%d}-server-overhead"
        files = free_files(arguments.out, stem, replace=arguments.replace)
        write(files, record, page)


def measure(arguments: argparse.Namespace, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Run all rounds and return their samples."""
    server = Server(arguments.model, options)
    offline = Child(str(HERE / "overhead" / "offline.py"), arguments.model, json.dumps(options))
    client = Child(str(HERE / "overhead" / "client.py"))
    try:
        offline.read()
        rng = random.Random(0)
        rounds: list[dict[str, Any]] = []
        for number in range(-1, arguments.rounds):  # the first one warms up
            output = 8 if number < 0 else arguments.output_len
            prompts = [
                [rng.randrange(1000, 40_000) for _ in range(arguments.input_len)]
                for _ in range(arguments.streams)
            ]
            sides = [ask_offline, ask_server] if number % 2 else [ask_server, ask_offline]
            sample: dict[str, Any] = {}
            for side in sides:
                sample |= side(server, offline, client, prompts, output)
            if number >= 0:
                rounds.append(sample)
        return rounds
    finally:
        for process in (server.process, offline.process, client.process):
            process.terminate()
            process.wait()


def ask_offline(
    _server: Server, offline: Child, _client: Child, prompts: list[list[int]], tokens: int
) -> dict[str, Any]:
    return {"offline": offline.ask({"prompts": prompts, "tokens": tokens})}


def ask_server(
    server: Server, _offline: Child, client: Child, prompts: list[list[int]], tokens: int
) -> dict[str, Any]:
    bodies = [
        {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for prompt in prompts
    ]
    used = server.cpu_seconds()
    answer = client.ask({"port": server.port, "bodies": bodies})
    answer["cpu_seconds"] = server.cpu_seconds() - used
    return {"http": answer}


def summary(
    arguments: argparse.Namespace, options: dict[str, Any], rounds: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the record: samples and what they come to."""

    def rates(side: str) -> list[float]:
        return [sample[side]["tokens"] / sample[side]["seconds"] for sample in rounds]

    ratios = [http / alone for http, alone in zip(rates("http"), rates("offline"), strict=True)]
    client = [s["http"]["client_cpu_seconds"] / s["http"]["seconds"] for s in rounds]
    extra = [
        (s["http"]["cpu_seconds"] - s["offline"]["cpu_seconds"]) / s["http"]["tokens"] * 1e6
        for s in rounds
    ]
    return {
        "kind": "server_overhead",
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": describe_machine(),
        "qinfer": describe_qinfer(HERE.parent),
        "model": Path(arguments.model).name,
        "streams": arguments.streams,
        "input_len": arguments.input_len,
        "output_len": arguments.output_len,
        "options": options,
        "http_tokens_per_second": spread(rates("http")),
        "offline_tokens_per_second": spread(rates("offline")),
        "ratio": spread(ratios),
        "client_share_of_a_core": spread(client),
        "server_cpu_beyond_offline_us_per_token": spread(extra),
        "rounds": rounds,
    }


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "lowest": round(min(values), 4),
        "highest": round(max(values), 4),
    }


def page_of(record: dict[str, Any]) -> str:
    """Return the record's page."""
    rows = [
        ("tokens/s through HTTP", "http_tokens_per_second", "{:,.0f}"),
        ("tokens/s offline", "offline_tokens_per_second", "{:,.0f}"),
        ("**ratio**", "ratio", "{:.3f}"),
        ("client, share of a core", "client_share_of_a_core", "{:.3f}"),
        (
            "server's CPU beyond offline, µs per token",
            "server_cpu_beyond_offline_us_per_token",
            "{:.0f}",
        ),
    ]
    setting = (
        f"{record['model']}, {record['input_len']} prompt and {record['output_len']} new tokens "
        f"each, {len(record['rounds'])} rounds; {record['machine']['processor']}, "
        f"{record['options']['threads']} threads; qinfer {record['qinfer']['commit']}."
    )
    lines = [
        f"# HTTP against offline: {record['streams']} streams, {record['date']}",
        "",
        setting,
        "",
        "| | median | lowest | highest |",
        "|---|--:|--:|--:|",
    ]
    for title, name, form in rows:
        cells = (form.format(record[name][part]) for part in ("median", "lowest", "highest"))
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
