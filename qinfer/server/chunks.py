"""The stream of chunks that completions and chats share: openings, token counts, `[DONE]`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from qinfer.engine.request import TokenEvent
from qinfer.engine.request import Usage as TokenCounts
from qinfer.server.json_writing import dumps
from qinfer.server.responses import ChatChunk, CompletionResponse, Usage, total_usage
from qinfer.server.streaming import sse, sse_error

DONE: Final = b"data: [DONE]\n\n"
_USAGE: Final = frozenset({"usage"})

Chunk = ChatChunk | CompletionResponse


class ChunkWriter(Protocol):
    """Turns events into one kind of chunk."""

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

    def begin(self) -> bytes:
        """Return nothing: each choice has its own opening."""
        return b""

    def event(self, index: int, event: TokenEvent) -> bytes:
        """Return the chunks that an event adds."""
        first = index not in self._so_far
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
        n = self.num_choices
        groups = [ordered[start : start + n] for start in range(0, len(ordered), n)]
        return sse(self.writer.usage(total_usage(groups)).model_dump_json()) + DONE

    def error(self, error: Exception) -> bytes:
        """Return the error and the end."""
        return sse_error(error) + DONE

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
