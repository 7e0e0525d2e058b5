"""The stalled reader, without megabytes: the transport says that its buffer is full."""

import asyncio
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.server import ServerState

from qinfer.server import protocol
from qinfer.server.protocol import LimitedProtocol


async def app(scope, receive, send):
    raise AssertionError("never called")


@pytest.mark.parametrize("resumes", [False, True])
def test_a_response_that_nobody_reads_ends_the_connection(monkeypatch, resumes):
    """S01: a slow reader must not hold memory for ever."""
    monkeypatch.setattr(protocol, "STALL_SECONDS", 0.05)

    async def main() -> None:
        transport = Mock()
        transport.get_extra_info.return_value = None
        connection = LimitedProtocol(uvicorn.Config(app, log_config=None), ServerState(), {})
        connection.connection_made(transport)
        connection.pause_writing()
        if resumes:
            connection.resume_writing()
        await asyncio.sleep(0.2)
        assert transport.abort.called is not resumes
        connection.connection_lost(None)

    asyncio.run(main())
