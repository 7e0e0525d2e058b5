import asyncio

import pytest

from qinfer.engine.request import TokenEvent
from qinfer.engine.streams import Stream
from qinfer.errors import RequestError


def event(token: int) -> TokenEvent:
    return TokenEvent("x", (token,), "")


def test_a_reader_that_falls_behind_gets_everything_at_once():
    async def main() -> None:
        stream = Stream()
        stream.unfinished = 1
        reader = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stream.put((0, event(1)))
        stream.put((0, event(2)))
        assert [item.token_ids for _, item in await reader] == [(1,), (2,)]
        for token in (3, 4, 5):
            stream.put((1, event(token)))
        assert stream.num_unread == 3
        assert [(number, item.token_ids) for number, item in await stream.take()] == [
            (1, (3,)),
            (1, (4,)),
            (1, (5,)),
        ]
        assert not stream.exhausted
        stream.unfinished = 0
        assert stream.exhausted

    asyncio.run(main())


def test_a_refusal_is_raised_where_the_stream_is_read():
    async def main() -> None:
        stream = Stream()
        reader = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stream.refuse(RequestError("no", field="n"))
        with pytest.raises(RequestError, match="no"):
            await reader
        assert not stream.exhausted  # it is still to be told

    asyncio.run(main())


def test_a_reader_that_gave_up_does_not_break_the_delivery():
    async def main() -> None:
        stream = Stream()
        reader = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        stream.put((0, event(1)))
        assert stream.num_unread == 1

    asyncio.run(main())
