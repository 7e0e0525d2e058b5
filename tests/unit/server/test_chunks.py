"""Chunks of text alone are written without their models; they must look as if they were."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.engine.request import TokenEvent, TokenLogprob
from qinfer.server.chunks import ChunkStream
from qinfer.server.responses import CompletionChoice, CompletionResponse, Usage


class Writer:
    """Makes chunks of completions, and counts them."""

    def __init__(self, *, copies_text: bool = True) -> None:
        self.copies_text = copies_text
        self.made = 0

    def opening(self, index: int, event: TokenEvent) -> None:
        return None

    def chunk(self, index: int, event: TokenEvent) -> CompletionResponse:
        self.made += 1
        return self._response([CompletionChoice(index=index, text=event.text)], None)

    def usage(self, usage: Usage) -> CompletionResponse:
        return self._response([], usage)

    def _response(self, choices: list[CompletionChoice], usage: Usage | None):
        return CompletionResponse(id="i", created=1, model="m", choices=choices, usage=usage)


def stream(writer, *, include_usage=False, continuous=False):
    return ChunkStream(writer, [3], 2, include_usage=include_usage, continuous=continuous)


def decoded(data: bytes):
    return json.loads(data.removeprefix(b"data: "))


@given(st.lists(st.tuples(st.integers(0, 1), st.text(min_size=1)), max_size=12), st.booleans())
def test_copied_texts_are_the_same_chunks(items, include_usage):
    fast = stream(Writer(), include_usage=include_usage)
    slow = stream(Writer(copies_text=False), include_usage=include_usage)
    for index, text in items:
        event = TokenEvent("x", (1,), text, index)
        assert decoded(fast.event(index, event)) == decoded(slow.event(index, event))


def test_one_model_serves_all_texts_of_a_choice():
    writer = Writer()
    chunks = stream(writer)
    for number in range(100):
        assert decoded(chunks.event(0, TokenEvent("x", (1,), str(number))))["choices"][0][
            "text"
        ] == str(number)
    assert writer.made == 2  # the first chunk, and the one that all others are copied from


@pytest.mark.parametrize(
    "event",
    [
        TokenEvent("x", (1,), "a", finish_reason="stop"),
        TokenEvent("x", (1,), "a", logprobs=(TokenLogprob(1, -1.0),)),
        TokenEvent("x", (1,), ""),
    ],
)
def test_whatever_is_more_than_text_is_written_as_a_model(event):
    writer = Writer()
    chunks = stream(writer)
    chunks.event(0, TokenEvent("x", (1,), "first"))
    chunks.event(0, event)
    assert writer.made == 2
    assert not chunks._around


def test_running_counts_are_in_every_chunk():
    chunks = stream(Writer(), include_usage=True, continuous=True)
    counts = [
        decoded(chunks.event(0, TokenEvent("x", (1, 2), "ab")))["usage"]["completion_tokens"]
        for _ in range(3)
    ]
    assert counts == [2, 4, 6]
