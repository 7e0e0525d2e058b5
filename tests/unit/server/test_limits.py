"""Bodies that are too large or take too long."""

import asyncio

import pytest
from starlette.exceptions import HTTPException

from qinfer.server.limits import BodyLimit


async def read(body_limit_seconds, delays):
    """Read a body whose pieces come after some seconds each; the app waits for the end after it."""
    pieces = list(delays)

    async def receive():
        if not pieces:
            await asyncio.sleep(0.1)
            return {"type": "http.disconnect"}
        await asyncio.sleep(pieces.pop(0))
        return {"type": "http.request", "body": b"x", "more_body": bool(pieces)}

    seen = []

    async def app(scope, receive, send):
        while (message := await receive())["type"] != "http.disconnect":
            seen.append(message["body"])

    async def send(message):
        raise AssertionError("nothing is sent")

    limit = BodyLimit(app, max_bytes=10, max_seconds=body_limit_seconds)
    await limit({"type": "http", "headers": []}, receive, send)
    return b"".join(seen)


def test_s04_a_body_that_trickles_in_is_given_up():
    with pytest.raises(HTTPException) as refused:
        asyncio.run(read(0.05, [0, 0.03, 0.03, 0.03]))
    assert refused.value.status_code == 408
    assert (refused.value.headers or {})["Connection"] == "close"


def test_waiting_for_the_end_of_a_complete_request_has_no_limit():
    assert asyncio.run(read(0.05, [0, 0])) == b"xx"


def test_s04_a_body_without_a_length_is_counted():
    with pytest.raises(HTTPException) as refused:
        asyncio.run(read(5, [0] * 11))
    assert refused.value.status_code == 413
