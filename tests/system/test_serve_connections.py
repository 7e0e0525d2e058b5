"""S04: connections that want to hold on to the server, over raw sockets."""

import json
import socket
from contextlib import suppress

import pytest
from support.live import live_server

from qinfer.server import protocol


@pytest.fixture(scope="module")
def server(tiny_llama):
    with live_server(tiny_llama) as live:
        yield live


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(protocol, "REQUEST_SECONDS", 0.3)


def connect(server):
    return socket.create_connection(server.address, timeout=30)


def until_closed(raw):
    data = b""
    while part := raw.recv(65536):
        data += part
    return data


def answer(raw):
    """Read one answer with a length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += raw.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length")
    )
    while len(body) < length:
        body += raw.recv(65536)
    return head, body


HEALTH = b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n"


@pytest.mark.parametrize("begun", [b"", b"GET /health HT", HEALTH[:-2]])
def test_a_head_that_does_not_come_in_time(server, impatient, begun):
    with connect(server) as raw:
        raw.sendall(begun)
        assert until_closed(raw).startswith(b"HTTP/1.1 400")


def test_a_second_head_that_does_not_come_in_time(server, impatient):
    with connect(server) as raw:
        raw.sendall(HEALTH)
        assert answer(raw)[0].startswith(b"HTTP/1.1 200")
        raw.sendall(b"G")
        assert until_closed(raw).startswith(b"HTTP/1.1 400")


def test_a_head_without_an_end(server):
    with connect(server) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\n")
        with suppress(OSError):  # broken pipe or reset, as the kernel likes
            for number in range(10_000):
                raw.sendall(b"X-Header-%d: %s\r\n" % (number, b"x" * 1000))
            raise AssertionError("ten megabytes of head were taken")
    with connect(server) as raw:
        raw.sendall(HEALTH)
        assert answer(raw)[0].startswith(b"HTTP/1.1 200")


def test_requests_one_after_the_other_are_no_endless_head(server, impatient):
    with connect(server) as raw:
        padding = b"X-Padding: " + b"x" * 30_000
        for _ in range(5):
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n" + padding + b"\r\n\r\n")
            assert answer(raw)[0].startswith(b"HTTP/1.1 200")


def test_the_rest_of_a_refused_body_is_read_and_the_connection_lives_on(server):
    body = json.dumps({"prompt": "x" * 6_000_000}).encode()
    with connect(server) as raw:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        raw.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert answer(raw)[0].startswith(b"HTTP/1.1 413")
        raw.sendall(HEALTH)
        assert answer(raw)[0].startswith(b"HTTP/1.1 200")


def test_a_request_that_takes_long_is_not_cut_off(server, impatient):
    """The clock runs for heads only: an answer may take as long as it takes."""
    body = json.dumps({"prompt": "x", "max_tokens": 100, "ignore_eos": True, "n": 8}).encode()
    with connect(server) as raw:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        raw.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert answer(raw)[0].startswith(b"HTTP/1.1 200")
