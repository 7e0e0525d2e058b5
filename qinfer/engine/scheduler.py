"""Which requests compute how many tokens in the next step. Torch-free.

One rule, no phases: every request has `num_computed` and `num_tokens`, and a step hands out a
token budget until they meet. Prefill, chunked prefill, decoding and resuming after preemption are
the same thing. Requests with one token to go come first, so that a long prompt never stalls
running streams; otherwise the first to arrive is the first served.

Three invariants carry the proofs: everything running arrived before everything waiting; a request
is admitted only with blocks for all its known tokens; the latest arrival is preempted first. So
the earliest request can always take what it needs, and it fits the pool (checked when added):
every request finishes.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qinfer.engine.blocks import BlockManager
from qinfer.engine.request import FinishReason, Request, RequestStatus
from qinfer.errors import CapacityError, RequestError


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step.

    Args:
        items: `(request, num_new)`: which requests compute how many of their tokens.
        preempted: requests that lost their blocks in favour of earlier ones.
        copies: `(source, target)` cache blocks to copy, in this order, before the step.
    """

    items: tuple[tuple[Request, int], ...]
    preempted: tuple[Request, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Counters:
    """What the scheduler counts over its life."""

    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    computed_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class Scheduler:
    """Continuous batching over the blocks of one pool.

    Args:
        blocks: the pool's books.
        max_batch_tokens: tokens of one step over all requests.
        max_running: requests that hold blocks at once.
        max_logit_rows: rows of logits of one step, which bounds the memory that scoring takes;
            None = as many as tokens.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch_tokens: int,
        max_running: int,
        max_logit_rows: int | None = None,
    ) -> None:
        self.blocks = blocks
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.max_logit_rows = max_batch_tokens if max_logit_rows is None else max_logit_rows
        self.counters = Counters()
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks yet, or no longer."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def has_unfinished(self) -> bool:
        """Whether there is work left."""
        return bool(self._requests)

    def check_capacity(self, num_slots: int) -> None:
        """Refuse what could never run, however empty the pool.

        Raises:
            CapacityError: `num_slots` tokens exceed the whole pool.
        """
        needed = self.blocks.num_needed(num_slots)
        if needed > self.blocks.num_blocks:
            capacity = self.blocks.num_blocks * self.blocks.block_size
            raise CapacityError(
                f"the request may grow to {num_slots} cached tokens, but the cache holds "
                f"{capacity}; lower max_tokens, shorten the prompt or give the engine more memory"
            )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: its id is in use.
            CapacityError: it could never run.
        """
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is already in use", field="request_id")
        self.check_capacity(request.max_slots)
        self._requests[request.id] = request
        self._waiting.append(request)

    def schedule(self) -> Batch:
        """Return the next step's work; blocks for it are taken, from later requests if need be."""
        budget = _Budget(self.max_batch_tokens, self.max_logit_rows)
        items: list[tuple[Request, int]] = []
        preempted: list[Request] = []
        decoding = sum(not _has_more_than_one_token_left(request) for request in self._running)
        for request in sorted(self._running, key=_has_more_than_one_token_left):
            decoding -= 1  # those behind this one come before its draft
            num_new = budget.share(request)
            room = budget.room_behind(num_new, max(decoding, 0))
            num_new += self._place_draft(request, num_new, room, reserve=max(decoding, 0))
            if num_new and self._make_room(request, num_new, preempted):
                budget.spend(request, num_new)
                items.append((request, num_new))
        if not preempted:
            self._admit(budget, items)
        copies = self.blocks.take_copies() if items else ()
        return Batch(tuple(items), tuple(preempted), copies)

    def update(self, batch: Batch, new_tokens: Mapping[str, Sequence[int]]) -> None:
        """Record that a batch was computed.

        Args:
            batch: what `schedule` returned.
            new_tokens: the new tokens of each request that got some, by request id: as much of its
                draft as was accepted, and one more.
        """
        for request, num_new in batch.items:
            accepted = new_tokens.get(request.id, ())
            num_right = _num_right(request.draft, accepted)
            num_known = num_new - len(request.draft)
            self.counters.computed_tokens += num_new
            self.counters.draft_tokens += len(request.draft)
            self.counters.accepted_draft_tokens += num_right
            request.draft.clear()
            request.tokens.extend(accepted)
            request.num_computed += num_known + num_right
            self.blocks.commit(request, num_known + num_right)
            if num_new > num_known + num_right:
                self.blocks.shrink(request, request.num_tokens)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Remove a request, waiting or running, and take its blocks back."""
        del self._requests[request.id]
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self.blocks.release(request)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def check_integrity(self) -> None:
        """Verify the books; for tests and idle moments.

        Raises:
            AssertionError: they are wrong.
        """
        self.blocks.check_integrity(self._running)
        if len(self._running) + len(self._waiting) != len(self._requests):
            raise AssertionError("a request is neither waiting nor running")

    def _place_draft(self, request: Request, num_new: int, room: int, *, reserve: int) -> int:
        """Drop what there is no room for from a request's draft; return what is left of it.

        A draft is a gamble: it takes idle blocks only, and none that the `reserve` requests behind
        may need.
        """
        end = request.num_computed + num_new
        if not request.draft or request.status is not RequestStatus.RUNNING:
            return 0
        room = min(room, request.max_slots - end) if end == request.num_tokens else 0
        del request.draft[max(room, 0) :]
        end += len(request.draft)
        if request.draft and not self.blocks.grow(request, end, reserve=reserve):
            request.draft.clear()
        return len(request.draft)

    def _make_room(self, request: Request, num_new: int, preempted: list[Request]) -> bool:
        """Extend a request's blocks, preempting from the latest on; False if it was itself hit."""
        if request.status is not RequestStatus.RUNNING:
            return False  # preempted earlier in this step
        while not self.blocks.grow(request, request.num_computed + num_new):
            victim = self._running.pop()
            self.blocks.release(victim)
            victim.draft.clear()
            victim.status = RequestStatus.WAITING
            victim.num_preemptions += 1
            self.counters.preemptions += 1
            self._waiting.appendleft(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _admit(self, budget: "_Budget", items: list[tuple[Request, int]]) -> None:
        """Start waiting requests, first come first served, while budget and blocks last."""
        while self._waiting and len(self._running) < self.max_running:
            request = self._waiting[0]
            if budget.share(request) == 0:
                return
            # One block for each running request's growth: else the newcomer is preempted at once.
            if not self.blocks.admit(request, reserve=len(self._running)):
                return
            self._waiting.popleft()
            self._running.append(request)
            request.status = RequestStatus.RUNNING
            self._count_hits(request)
            num_new = budget.share(request)
            if num_new:  # a prefix hit may leave only rows that do not fit into this step
                budget.spend(request, num_new)
                items.append((request, num_new))

    def _count_hits(self, request: Request) -> None:
        """Count prefix hits of first admissions; finding one's own blocks again is no hit."""
        if request.num_preemptions or not request.use_prefix_cache:
            return
        request.num_cached = request.num_computed
        self.counters.prefix_query_tokens += request.num_tokens
        self.counters.prefix_hit_tokens += request.num_computed


class _Budget:
    """What is left of a step: tokens to compute and rows of logits."""

    def __init__(self, tokens: int, rows: int) -> None:
        self.tokens = tokens
        self.rows = rows

    def share(self, request: Request) -> int:
        """Return how many of its remaining tokens a request may compute."""
        num_new = min(request.num_tokens - request.num_computed, self.tokens)
        excess = len(request.wanted_rows(num_new)) - self.rows
        return max(num_new - excess, 0) if excess > 0 else num_new

    def room_behind(self, num_new: int, num_others: int) -> int:
        """Return how much draft may follow `num_new` tokens if `num_others` get one token each."""
        return min(self.tokens - num_new, self.rows - 1) - num_others

    def spend(self, request: Request, num_new: int) -> None:
        """Take a share off the budget."""
        self.tokens -= num_new
        self.rows -= len(request.wanted_rows(num_new))


def _num_right(draft: Sequence[int], accepted: Sequence[int]) -> int:
    """Return how many leading drafted tokens came true; the last accepted one is not computed."""
    num_right = 0
    for drafted, token in zip(draft, accepted[:-1], strict=False):
        if drafted != token:
            break
        num_right += 1
    return num_right


def _has_more_than_one_token_left(request: Request) -> bool:
    return request.num_tokens - request.num_computed > 1
