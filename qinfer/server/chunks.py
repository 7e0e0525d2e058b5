"""The stream of chunks that completions and chats share: openings, token counts, `[DONE]`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from qinfer.engine.request import TokenEvent
from qinfer.engine.request import Usage as TokenCounts
from qinfer.server.json_writing import dumps
from qinfer.server.responses import ChatChunk, CompletionResponse, Usage, total_usage
from qinfer.server.streaming import sse, sse_error

DONE: Final = b"data: [DONE]\n\n"
_USAGE: Final = frozenset({"usage"})
_MARK: Final = "\ufdd0"  # stands for a chunk's text; Unicode says that no text holds it

Chunk = ChatChunk | CompletionResponse


class ChunkWriter(Protocol):
    """Turns events into one kind of chunk."""

    @property
    def copies_text(self) -> bool:
        """Whether an event that brings nothing but text becomes a chunk of just that text."""

    def opening(self, index: int, event: TokenEvent) -> Chunk | None:
        """Return what goes before a choice's first event, if anything."""

    def chunk(self, index: int, event: TokenEvent) -> Chunk | None:
        """Return the chunk of an event; None if there is nothing to show yet."""

    def usage(self, usage: Usage) -> Chunk:
        """Return the last chunk, which has no choices."""


@dataclass(slots=True)
class ChunkStream:
    """A stream of chunks.

    Args:
        writer: makes the chunks.
        num_prompt_tokens: of each prompt.
        num_choices: per prompt.
        include_usage: a last chunk carries the token counts.
        continuous: every chunk carries the counts of its choice so far.
    """

    writer: ChunkWriter
    num_prompt_tokens: Sequence[int]
    num_choices: int
    include_usage: bool
    continuous: bool
    _so_far: dict[int, int] = field(default_factory=dict)
    _counts: dict[int, TokenCounts] = field(default_factory=dict)
    _around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # the text, by choice
    _copies_text: bool = field(init=False)

    def __post_init__(self) -> None:
        """Look once at what holds for the whole stream."""
        self._copies_text = self.writer.copies_text and not self.continuous

    def begin(self) -> bytes:
        """Return nothing: each choice has its own opening."""
        return b""

    def event(self, index: int, event: TokenEvent) -> bytes:
        """Return the chunks that an event adds."""
        first = index not in self._so_far
        if not first and self._is_text(event):
            return self._text(index, event)
        opening = self.writer.opening(index, event) if first else None
        data = b"" if opening is None else self._encode(index, opening, large=True)
        self._so_far[index] = self._so_far.get(index, 0) + len(event.token_ids)
        if event.usage is not None:
            self._counts[index] = event.usage
        chunk = self.writer.chunk(index, event)
        return data if chunk is None else data + self._encode(index, chunk)

    def end(self) -> bytes:
        """Return the token counts, if asked for, and the end."""
        if not self.include_usage:
            return DONE
        ordered = [self._counts[index] for index in sorted(self._counts)]
        usage = total_usage(ordered, self.num_choices)
        return sse(self.writer.usage(usage).model_dump_json()) + DONE

    def error(self, error: Exception) -> bytes:
        """Return the error and the end."""
        return sse_error(error) + DONE

    def _is_text(self, event: TokenEvent) -> bool:
        """Tell whether an event brings nothing but text, as most of most streams do."""
        text_alone = event.finish_reason is None and event.logprobs is None
        return self._copies_text and text_alone and bool(event.text)

    def _text(self, index: int, event: TokenEvent) -> bytes:
        """Return the chunk of an event that brings nothing but text.

        All that is around the text is the same in every such chunk, so it is written only once.
        """
        if index not in self._around:
            chunk = self.writer.chunk(index, replace(event, text=_MARK))
            assert chunk is not None
            before, after = self._encode(index, chunk).split(f'"{_MARK}"'.encode())
            self._around[index] = before, after
        before, after = self._around[index]
        return before + json.dumps(event.text, ensure_ascii=False).encode() + after

    def _encode(self, index: int, chunk: Chunk, *, large: bool = False) -> bytes:
        hidden = frozenset() if self.include_usage else _USAGE  # S06: absent unless asked for
        if self.continuous:
            prompt = self.num_prompt_tokens[index // self.num_choices]
            made = self._so_far.get(index, 0)
            chunk.usage = Usage(
                prompt_tokens=prompt, completion_tokens=made, total_tokens=prompt + made
            )
        if large:
            return sse(dumps(chunk, exclude=hidden))
        return sse(chunk.model_dump_json(exclude=set(hidden)))
