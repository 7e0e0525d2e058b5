"""Many clients, some of them rude, against `qinfer serve` with too little cache; see `make soak`.

    python tests/soak/soak.py                              # 500 clients, 5,000 requests
    python tests/soak/soak.py --clients 50 --requests 500

The server is a process of its own on a free loopback port, with a tiny model and a pool so small
that requests are preempted. What clients get is compared with what the engine gives each request
alone, with ample memory. It ends by itself; the status is 0 if everything held:

- every answer is the right one: texts, choices, beams, status codes; none is lost;
- the sequences, tokens and statuses that the server counted are those that the clients saw;
- afterwards all cache blocks are free and nothing runs;
- memory is flat after the first tenth of the requests.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.checkpoints import write_tiny

from qinfer import LLM, SamplingParams
from qinfer.engine.beams import BeamParams

NUM_PROMPTS = 40
LENGTHS = (4, 24, 60)
MAX_LEN = 128
START_SECONDS = 60
LIMIT_SECONDS = 1200
MAX_TRIES = 400
RSS_SLACK = 24 << 20  # what allocators keep of a peak of open connections
# kind -> weight
KINDS = {
    "text": 30,
    "stream": 25,
    "chat": 8,
    "two": 8,
    "beams": 4,
    "leave": 10,
    "bad": 8,
    "long": 7,
}


@dataclass(frozen=True)
class Job:
    """One request that a client will make."""

    kind: str
    prompt: int
    length: int


@dataclass
class Seen:
    """What the clients saw."""

    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    sequences: int = 0  # that ended as they should
    tokens: int = 0  # of these
    abandoned: int = 0  # sequences whose client left
    done: int = 0


class LostError(Exception):
    """A connection ended without a whole answer."""


async def ask(port: int, body: bytes, *, leave_after: int | None = None) -> tuple[int, str, bytes]:
    """Post to a route given as `ROUTE\\nJSON`; returns status, head and body.

    With `leave_after` the client goes away after so many bytes.
    """
    route, _, content = body.partition(b"\n")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST {route.decode()} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        if leave_after is not None:
            await reader.read(leave_after)
            writer.transport.abort()
            return 0, "", b""
        answer = await reader.read(-1)
    except ConnectionError as error:
        raise LostError(str(error)) from error
    finally:
        writer.close()
    head_bytes, separator, payload = answer.partition(b"\r\n\r\n")
    if not separator:
        raise LostError(f"{len(answer)} bytes came")
    answer_head = head_bytes.decode()
    if "transfer-encoding: chunked" in answer_head.lower():
        payload = unchunk(payload)
    return int(answer_head.split(" ", 2)[1]), answer_head, payload


def unchunk(data: bytes) -> bytes:
    """Return the content of a chunked body.

    Raises:
        LostError: it is not complete.
    """
    parts: list[bytes] = []
    while True:
        size, separator, data = data.partition(b"\r\n")
        if not separator:
            raise LostError("a chunked body ended early")
        count = int(size, 16)
        if count == 0:
            return b"".join(parts)
        parts.append(data[:count])
        data = data[count + 2 :]


class Expected:
    """Prompts, and what the engine makes of each alone."""

    def __init__(self, model: Path, seed: int) -> None:
        draw = random.Random(seed)
        letters = "abcdefghijklmnopqrstuvwxyz "
        shared = "".join(draw.choices(letters, k=24))  # prefixes that the cache can share
        self.prompts = [
            (shared if index % 2 else "") + "".join(draw.choices(letters, k=draw.randint(4, 30)))
            for index in range(NUM_PROMPTS)
        ]
        with LLM(model, device="cpu", threads=1, enable_prefix_caching=False) as llm:
            self.texts: dict[tuple[int, int], tuple[str, int]] = {}
            self.beams: dict[int, list[str]] = {}
            self.chats: dict[int, tuple[str, int]] = {}
            for index, prompt in enumerate(self.prompts):
                for length in LENGTHS:
                    params = SamplingParams(temperature=0.0, max_tokens=length)
                    output = llm.generate(prompt, params)[0].outputs[0]
                    self.texts[index, length] = (output.text, len(output.token_ids))
                chat = llm.chat(
                    [{"role": "user", "content": prompt}],
                    SamplingParams(temperature=0.0, max_tokens=LENGTHS[0]),
                )[0].outputs[0]
                self.chats[index] = (chat.text, len(chat.token_ids))
                beams = BeamParams(beam_width=2, num_return_sequences=2, max_tokens=LENGTHS[0])
                self.beams[index] = [
                    each.text for each in llm.beam_search([prompt], beams)[0].outputs
                ]


class Client:
    """Makes requests and compares the answers."""

    def __init__(self, port: int, expected: Expected, seen: Seen) -> None:
        self.port, self.expected, self.seen = port, expected, seen

    async def work(self, jobs: list[Job]) -> None:
        while jobs:
            job = jobs.pop()
            try:
                await self.do(job)
            except (LostError, OSError, ValueError, KeyError, IndexError) as error:
                self.wrong(job, f"{type(error).__name__}: {error}")
            self.seen.kinds[job.kind] += 1
            self.seen.done += 1

    def wrong(self, job: Job, what: str) -> None:
        self.seen.wrong.append(f"{job.kind} prompt {job.prompt} length {job.length}: {what}")

    async def do(self, job: Job) -> None:
        if job.kind == "leave":
            body = self.body(job, stream=True)
            await ask(self.port, body, leave_after=random.choice((1, 200, 900)))
            self.seen.abandoned += 1
            return
        if job.kind == "bad":
            content = random.choice((b"{", b'{"prompt": 5}', b'{"model":"m","prompt":"x","n":-1}'))
            status, _, _ = await self.insist(b"/v1/completions\n" + content)
            if status not in (400, 422):
                self.wrong(job, f"status {status}")
            return
        status, _, payload = await self.insist(self.body(job, stream=job.kind == "stream"))
        if job.kind == "long":
            if status != 400:
                self.wrong(job, f"status {status}")
            return
        if status != 200:
            self.wrong(job, f"status {status}: {payload[:200]!r}")
            return
        self.compare(job, payload)

    async def insist(self, body: bytes) -> tuple[int, str, bytes]:
        """Ask until the server has room; it says when to come again."""
        for _ in range(MAX_TRIES):
            status, head, payload = await ask(self.port, body)
            self.seen.statuses[str(status)] += 1
            if status not in (429, 503):
                return status, head, payload
            if not re.search(r"(?i)^retry-after: \d+", head, re.MULTILINE):
                raise LostError(f"status {status} without Retry-After")
            await asyncio.sleep(random.uniform(0.2, 1.5))
        raise LostError("the server never had room")

    def body(self, job: Job, *, stream: bool) -> bytes:
        prompt = self.expected.prompts[job.prompt]
        fields: dict[str, Any] = {"model": "m", "max_tokens": job.length, "temperature": 0}
        if job.kind == "chat":
            fields |= {"messages": [{"role": "user", "content": prompt}], "max_tokens": LENGTHS[0]}
            return b"/v1/chat/completions\n" + json.dumps(fields).encode()
        fields["prompt"] = prompt
        if job.kind == "long":
            fields["prompt"] = prompt * 40
        if job.kind == "two":
            fields["n"] = 2
        if job.kind == "beams":
            fields |= {"use_beam_search": True, "n": 2, "max_tokens": LENGTHS[0]}
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return b"/v1/completions\n" + json.dumps(fields).encode()

    def compare(self, job: Job, payload: bytes) -> None:
        if job.kind == "stream":
            texts, usage = read_stream(payload)
        else:
            answer = json.loads(payload)
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            texts = [c["message"]["content"] if job.kind == "chat" else c["text"] for c in choices]
            usage = answer["usage"]
        text, count = self.expected.texts[job.prompt, job.length]
        if job.kind == "chat":
            text, count = self.expected.chats[job.prompt]
        wanted = [text, text] if job.kind == "two" else [text]
        if job.kind == "beams":
            wanted = self.expected.beams[job.prompt]
        if texts != wanted:
            self.wrong(job, f"{texts!r} instead of {wanted!r}")
            return
        if job.kind != "beams":
            if usage["completion_tokens"] != count * len(wanted):
                self.wrong(job, f"usage {usage}, {count} tokens each")
            self.seen.sequences += len(wanted)
            self.seen.tokens += count * len(wanted)


def read_stream(payload: bytes) -> tuple[list[str], dict[str, int]]:
    """Return the texts and the usage of a stream of one choice."""
    events = [line[6:] for line in payload.decode().split("\n") if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise LostError("the stream has no [DONE]")
    chunks = [json.loads(event) for event in events[:-1]]
    errors = [chunk for chunk in chunks if "error" in chunk]
    if errors:
        raise LostError(str(errors[0]))
    text = "".join(c["text"] for chunk in chunks for c in chunk["choices"])
    return [text], chunks[-1]["usage"]


def rss(pid: int) -> int:
    """Return the resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise LostError("the server is gone")


async def watch(pid: int, seen: Seen, samples: list[tuple[int, int]]) -> None:
    while True:
        samples.append((seen.done, rss(pid)))
        await asyncio.sleep(0.25)


def start(model: Path, log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start the server; returns it and its port."""
    command = [sys.executable, "-c", "from qinfer.cli.main import main; main()", "serve"]
    command += [str(model), "--served-model-name", "m", "--port", "0", "--num-blocks", "32"]
    command += ["--max-num-seqs", "24", "--max-queue", "200", "--max-model-len", str(MAX_LEN)]
    command += ["--max-num-batched-tokens", "128", "--kv-cache-dtype", "auto"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, stdout=file)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text(errors="replace"))
        if found:
            return process, int(found[1])
        time.sleep(0.1)
    process.kill()
    raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')}")


async def get(port: int, route: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {route} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n\r\n".encode())
    head, _, payload = (await reader.read(-1)).partition(b"\r\n\r\n")
    writer.close()
    return unchunk(payload) if b"chunked" in head.lower() else payload


async def settle(port: int) -> dict[str, Any]:
    """Wait until nothing runs; returns the server's figures."""
    for _ in range(200):
        stats: dict[str, Any] = json.loads(await get(port, "/v1/qinfer/stats"))
        engine = stats["engine"]
        if engine["running"] == engine["waiting"] == 0:
            return stats
        await asyncio.sleep(0.1)
    raise SystemExit(f"requests are left over: {engine}")


def judge(
    seen: Seen, stats: dict[str, Any], samples: list[tuple[int, int]], args: argparse.Namespace
) -> list[str]:
    """Return what did not hold."""
    engine = stats["engine"]
    faults = [*seen.wrong[:20]]
    if seen.done != args.requests:
        faults.append(f"{args.requests - seen.done} requests are lost")
    if engine["free_blocks"] != engine["num_blocks"]:
        faults.append(f"{engine['num_blocks'] - engine['free_blocks']} blocks are not free")
    if not engine["preemptions"]:
        faults.append("nothing was preempted: the pool is too large to prove anything")
    ended = engine["ended"]
    finished = ended.get("stop", 0) + ended.get("length", 0)
    beams = 2 * seen.kinds["beams"]
    # Who left may have left after the end, or before anything began.
    if not seen.sequences <= finished <= seen.sequences + beams + seen.abandoned:
        faults.append(f"clients saw {seen.sequences} sequences end, the server {finished}")
    if ended.get("error", 0) or ended.get("abort", 0) > seen.abandoned:
        faults.append(f"{ended} sequences ended, {seen.abandoned} clients left")
    if engine["generation_tokens"] < seen.tokens:
        faults.append(f"clients saw {seen.tokens} tokens, the server {engine['generation_tokens']}")
    first = [size for done, size in samples if args.requests / 10 <= done < args.requests / 5]
    last = [size for done, size in samples if done >= args.requests * 0.9]
    if first and last and statistics.median(last) > max(first) * 1.03 + RSS_SLACK:
        faults.append(f"memory grew from {max(first):,} to {statistics.median(last):,.0f} bytes")
    return faults


async def compare_statuses(port: int, seen: Seen) -> list[str]:
    """Compare the server's counts of answers with the clients'."""
    text = (await get(port, "/metrics")).decode()
    counted: Counter[str] = Counter()
    pattern = r"^qinfer:http_requests_total\{(.*?)\} ([0-9.e+]+)$"
    for labels, value in re.findall(pattern, text, re.MULTILINE):
        found = re.search(r'status="(\d+)"', labels)
        if found and "completions" in labels:
            counted[found[1]] += int(float(value))
    if not counted:
        return ["the server counted no answers"]
    # Who left may have been answered, or refused, unseen.
    return [
        f"{seen.statuses[status]} answers with status {status} came, the server counted {count}"
        for status, count in counted.items()
        if not 0 <= count - seen.statuses[status] <= (seen.abandoned if status != "400" else 0)
    ]


async def soak(args: argparse.Namespace, port: int, pid: int, expected: Expected) -> int:
    draw = random.Random(args.seed)
    kinds = draw.choices(list(KINDS), list(KINDS.values()), k=args.requests)
    jobs = [Job(kind, draw.randrange(NUM_PROMPTS), draw.choice(LENGTHS)) for kind in kinds]
    seen = Seen()
    samples: list[tuple[int, int]] = []
    watcher = asyncio.create_task(watch(pid, seen, samples))
    begin = time.monotonic()
    clients = [Client(port, expected, seen).work(jobs) for _ in range(args.clients)]
    async with asyncio.timeout(LIMIT_SECONDS):
        await asyncio.gather(*clients)
    seconds = time.monotonic() - begin
    stats = await settle(port)
    watcher.cancel()
    faults = judge(seen, stats, samples, args) + await compare_statuses(port, seen)
    engine = stats["engine"]
    result = {
        "clients": args.clients,
        "requests": args.requests,
        "seconds": round(seconds, 1),
        "kinds": dict(seen.kinds),
        "statuses": dict(seen.statuses),
        "sequences": seen.sequences,
        "ended": engine["ended"],
        "preemptions": engine["preemptions"],
        "prefix_hit_tokens": engine["prefix_hit_tokens"],
        "shared_tokens": engine["shared_tokens"],
        "rss_first_bytes": samples[len(samples) // 10][1],
        "rss_last_bytes": samples[-1][1],
        "faults": faults,
    }
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result there, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, log = Path(folder) / "tiny", Path(folder) / "server.log"
        write_tiny(model)
        expected = Expected(model, args.seed)
        process, port = start(model, log)
        try:
            status = asyncio.run(soak(args, port, process.pid, expected))
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=60)
            if code != 0:
                sys.stdout.write(f"the server ended with {code}\n{log.read_text()[-2000:]}\n")
                status = 1
        finally:
            process.kill()
            process.wait()
    return status


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
