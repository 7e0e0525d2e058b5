"""A beam search in the engine: one request per open beam, which share blocks until they differ.

The beams of a search advance together: each has its row of logits computed when the scheduler
gets to it, and waits until the others have theirs. Then the search says which of them go on. A
beam that goes on with several tokens is forked, one that goes on with none is dropped.

If one beam loses its blocks, all do: beams that hold blocks and wait for one that has none could
block each other for good. The search itself loses nothing, only cache is computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from qinfer.engine.beams import BeamParams, BeamSearch, Candidate, Continuation, Hypothesis
from qinfer.engine.jobs import last_event
from qinfer.engine.output import OutputStream, TokenDecoder
from qinfer.engine.request import FinishReason, Request, RequestStatus, TokenEvent, Usage
from qinfer.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Beam:
    """A request that is one beam of a search."""

    request: Request
    group: "BeamGroup"


@dataclass(slots=True)
class BeamGroup:
    """A search, the requests of its open beams, and what it is waiting for.

    Args:
        root: the request that was added for the prompt.
        params: of the search.
        tokenizer: turns tokens into bytes.
        scheduler: runs the beams.
        members: the requests of the open beams, in the order of `search.beams`.
        search: which tokens and beams there are.
    """

    root: Request
    params: BeamParams
    tokenizer: TokenDecoder
    scheduler: Scheduler
    members: list[Request] = field(init=False)
    search: BeamSearch = field(init=False)
    _candidates: dict[str, list[Candidate]] = field(default_factory=dict)
    _num_forks: int = 0

    def __post_init__(self) -> None:
        """Start with the prompt as the only beam."""
        self.members = [self.root]
        self.search = BeamSearch(
            self.params,
            self.root.max_length - self.root.num_prompt,
            self.root.stop_ids,
            self._ends_in_stop_string if self.params.stop else None,
        )

    @property
    def complete(self) -> bool:
        """Whether every beam has its logits, so that the search can take a step."""
        return len(self._candidates) == len(self.members)

    def add_row(self, request: Request, logits: torch.Tensor) -> None:
        """Keep what the search needs of a beam's row of `logits` `[vocab]`."""
        count = min(self.search.num_candidates, logits.shape[0])
        top = torch.log_softmax(logits, dim=-1).topk(count)
        self._candidates[request.id] = list(
            zip(top.indices.tolist(), top.values.tolist(), strict=True)
        )

    def restart(self) -> None:
        """Take the blocks of all beams, since one of them has lost its own."""
        for request in self.members:
            if request.status is RequestStatus.RUNNING:
                self.scheduler.preempt(request)
        self._candidates.clear()

    def advance(self) -> tuple[list[Request], list[Request]]:
        """Let the search take its step and return the beams that began and those that ended.

        The requests that ended still hold their blocks. If all have, the search is over.
        """
        rows = [self._candidates[request.id] for request in self.members]
        continuations = self.search.step(rows)
        self._candidates.clear()
        before, begun = self.members, []
        self.members = []
        for continuation in continuations:
            parent = before[continuation.parent]
            if parent not in self.members:
                self.members.append(parent)
            else:
                child = self._fork(parent, continuation)
                begun.append(child)
                self.members.append(child)
        for request, beam in zip(self.members, self.search.beams, strict=bool(continuations)):
            request.tokens[request.num_prompt :] = beam.tokens
        if self.members and all(request.forked for request in self.members):
            self.members[0].forked = False  # a search counts as one running request
        return begun, [request for request in before if request not in self.members]

    def events(self) -> list[TokenEvent]:
        """Return one event per sequence, best first, once the search is over."""
        results: list[Hypothesis | None] = list(self.search.results())
        results += [None] * (self.params.num_return_sequences - len(results))
        return [self._event(index, result) for index, result in enumerate(results)]

    def last_events(self, reason: FinishReason, error: str | None = None) -> list[TokenEvent]:
        """Return an event per sequence that tells the end of the search and nothing else."""
        return [
            replace(last_event(self.root, reason, error), index=index)
            for index in range(self.params.num_return_sequences)
        ]

    def _fork(self, parent: Request, continuation: Continuation) -> Request:
        self._num_forks += 1
        child = replace(
            self.root,
            id=f"{self.root.id}/{self._num_forks}",
            tokens=[*parent.tokens, continuation.token],
            draft=[],
            block_ids=[],
            block_hashes=list(parent.block_hashes),
            status=RequestStatus.WAITING,
            num_computed=0,
        )
        self.scheduler.fork(parent, child)
        return child

    def _event(self, index: int, result: Hypothesis | None) -> TokenEvent:
        """Return the event of a sequence; None: the vocabulary did not offer that many."""
        if result is None:
            return replace(last_event(self.root, "length"), index=index)
        text = self._text_of(result.tokens)
        return TokenEvent(
            request_id=self.root.parent,
            index=index,
            token_ids=result.tokens,
            text=text,
            finish_reason="stop" if result.stopped else "length",
            usage=Usage(self.root.num_prompt, len(result.tokens), self.root.num_cached),
            queue_seconds=self.root.queue_seconds,
            score=result.score,
        )

    def _text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of a finished sequence, as any other request would give it."""
        request = replace(self.root, tokens=self.root.tokens[: self.root.num_prompt])
        output = OutputStream(request, self.tokenizer)
        texts = []
        for token in tokens:
            request.tokens.append(token)
            text, _ = output.push(token)
            texts.append(text)
        return "".join(texts)

    def _ends_in_stop_string(self, tokens: tuple[int, ...]) -> bool:
        """Tell whether a stop string ends within the newest token."""
        newest = self._bytes_of(tokens[-1])
        for stop in self.params.stop:
            wanted = stop.encode()
            tail, missing = newest, len(wanted) - 1
            for token in reversed(tokens[:-1]):
                if missing <= 0:
                    break
                before = self._bytes_of(token)
                tail, missing = before[-missing:] + tail, missing - len(before)
            if newest and wanted in tail:
                return True
        return False

    def _bytes_of(self, token: int) -> bytes:
        if self.params.skip_special_tokens and token in self.tokenizer.special_ids:
            return b""
        return self.tokenizer.token_bytes(token)
