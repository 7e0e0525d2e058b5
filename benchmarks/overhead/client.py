"""The client of `server_overhead.py`: as little work per byte as Python allows, itself measured.

A process of its own, so that it shares no interpreter with the server. It opens all connections,
sends all requests at once, and only looks for the end of each stream; nothing is parsed meanwhile.
One JSON line goes in (`{"port": ..., "bodies": [...]}`), one comes out, until the input ends.
"""

import asyncio
import json
import resource
import sys
import time
from typing import Any

DONE = b"data: [DONE]\n\n"


class Streamer(asyncio.Protocol):
    """One request and its stream: when it began and ended, and its bytes."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.first = self.last = 0.0
        self.reads = 0
        self.parts: list[bytes] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        if not self.first:
            self.first = time.perf_counter()
        self.parts.append(data)
        # The end may come in two pieces, and something of HTTP's own after it.
        if not self.done.done() and (DONE in data or DONE in b"".join(self.parts[-2:])):
            self.last = time.perf_counter()
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or EOFError("the stream was cut off"))


def request_of(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def usage_of(stream: bytes) -> int:
    """Return the generated tokens that the last chunk before the end tells."""
    start = stream.rindex(b'"completion_tokens":')
    return int(stream[start + 20 :].lstrip().split(b",")[0].split(b"}")[0])


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def stream_all(port: int, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Send all requests at once and wait for the end of the last stream."""
    loop = asyncio.get_running_loop()
    streamers = [
        (await loop.create_connection(lambda b=body: Streamer(request_of(b)), "127.0.0.1", port))[1]
        for body in bodies
    ]
    await asyncio.sleep(0.2)
    used, begin = cpu_seconds(), time.perf_counter()
    for streamer in streamers:
        assert streamer.transport is not None
        streamer.transport.write(streamer.request)
    await asyncio.gather(*(streamer.done for streamer in streamers))
    end, used = time.perf_counter(), cpu_seconds() - used
    streams = [b"".join(streamer.parts) for streamer in streamers]
    for streamer, stream in zip(streamers, streams, strict=True):
        assert stream.startswith(b"HTTP/1.1 200"), stream[:500]
        assert streamer.transport is not None
        streamer.transport.close()
    return {
        "seconds": end - begin,
        "first_seconds": max(streamer.first for streamer in streamers) - begin,
        "tokens": sum(map(usage_of, streams)),
        "chunks": sum(stream.count(b"data: ") for stream in streams),
        "reads": sum(streamer.reads for streamer in streamers),
        "bytes": sum(map(len, streams)),
        "client_cpu_seconds": used,
    }


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        result = asyncio.run(stream_all(order["port"], order["bodies"]))
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
