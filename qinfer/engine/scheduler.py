"""Which requests compute how many tokens in the next step. Torch-free.

One rule, no phases: every request has `num_computed` and `num_tokens`, and a step hands out a
token budget until they meet. Prefill, chunked prefill, decoding, verifying a draft and resuming
after preemption are the same thing. Requests with one token to go come first, so that a long
prompt never stalls running streams; otherwise the rank decides: lower priority numbers first, and
among equals the first to arrive.

Why every request finishes, unless requests of a better class keep coming forever:

1. When blocks run out, the worst rank is preempted. So the best-ranked running request always
   gets what it needs, and it fits the pool (checked when added): running requests finish.
2. The first waiting request that is not held is admitted next or nobody is, and it needs no more
   than the pool: when those that run have finished, there is room. A request is admitted only with
   blocks for all its known tokens, so admission alone never leads to preemption.
3. A request is held only while an earlier-ranked sample of its prompt computes that prompt, which
   ends by 1; then it shares the prompt's blocks instead of computing them again.
4. Within a class nobody is preempted to admit another. Where a waiting request is of a better class
   than running ones, it takes what it lacks from the worst of these.

`StaticScheduler` in `engine.static` is the textbook's other way, for comparison.
"""

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qinfer.engine.blocks import BlockManager
from qinfer.engine.request import FinishReason, Request, RequestStatus
from qinfer.errors import CapacityError, OverloadedError, RequestError


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step.

    Args:
        items: `(request, num_new)`: which requests compute how many of their tokens.
        preempted: requests that lost their blocks in favour of others.
        copies: `(source, target)` cache blocks to copy, in this order, before the step.
        padding: finished requests of a static batch that are computed for nothing, behind `items`.
    """

    items: tuple[tuple[Request, int], ...]
    preempted: tuple[Request, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    padding: tuple[tuple[Request, int], ...] = ()

    @property
    def sequences(self) -> tuple[tuple[Request, int], ...]:
        """All that goes through the model, in the order of its rows."""
        return self.items + self.padding


@dataclass(slots=True)
class Counters:
    """What the scheduler counts over its life.

    Args:
        preemptions: times that a request lost its blocks.
        prefix_query_tokens: tokens of new requests that were looked up in the prefix cache.
        prefix_hit_tokens: of them, those found.
        shared_tokens: tokens that a request took over from another sample of its prompt.
        computed_tokens: tokens that went through the model, recomputed ones and drafts included.
        draft_tokens: of them, proposed ones.
        accepted_draft_tokens: of these, those that came true.
        padding_tokens: of the computed ones, those of finished slots of a static batch.
    """

    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    shared_tokens: int = 0
    computed_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    padding_tokens: int = 0


class Scheduler:
    """Continuous batching over the blocks of one pool.

    Args:
        blocks: the pool's books.
        max_batch_tokens: tokens of one step over all requests.
        max_running: requests that are admitted to hold blocks at once.
        max_logit_rows: rows of logits of one step, which bounds the memory that scoring takes;
            None = as many as tokens.
        max_queue: requests that may wait beside those that can run; None = any number.
        max_mixed_tokens: tokens of prompts in a step in which others decode, which bounds the gaps
            in their streams; None = all that the step has room for.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch_tokens: int,
        max_running: int,
        max_logit_rows: int | None = None,
        max_queue: int | None = None,
        max_mixed_tokens: int | None = None,
    ) -> None:
        self.blocks = blocks
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.max_logit_rows = max_batch_tokens if max_logit_rows is None else max_logit_rows
        self.max_queue = max_queue
        self.max_mixed_tokens = max_mixed_tokens
        self.counters = Counters()
        self._num_added = 0
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []  # both by rank
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

    def check_capacity(self, num_slots: int, *, num_sequences: int = 1) -> None:
        """Refuse what could never run, however empty the pool.

        Args:
            num_slots: tokens whose K and V each sequence can hold.
            num_sequences: sequences that must be in the pool together, such as beams.

        Raises:
            CapacityError: they exceed the whole pool.
        """
        needed = self.blocks.num_needed(num_slots) * num_sequences
        if needed > self.blocks.num_blocks:
            capacity = self.blocks.num_blocks * self.blocks.block_size
            times = "" if num_sequences == 1 else f"{num_sequences} times "
            raise CapacityError(
                f"the request may grow to {times}{num_slots} cached tokens, but the cache holds "
                f"{capacity}; lower max_tokens, shorten the prompt or give the engine more memory"
            )

    def check_queue(self) -> None:
        """Refuse new work where as much waits as may.

        Raises:
            OverloadedError: all slots are taken and the queue is full.
        """
        if self.max_queue is not None and len(self._requests) >= self.max_running + self.max_queue:
            raise OverloadedError(
                f"{self.max_running} requests can run and {self.max_queue} may wait (max_queue), "
                f"and {len(self._requests)} are here already; try again later"
            )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: its id is in use.
            CapacityError: it could never run.
        """
        self._refuse_known(request)
        self.check_capacity(request.max_slots)
        self._enlist(request)
        insort(self._waiting, request, key=_rank)

    def fork(self, parent: Request, child: Request) -> None:
        """Start a request that continues tokens which a running one has computed.

        It runs at once and shares the blocks, whatever `max_running` says; where they go different
        ways, blocks are copied. It ranks right behind its parent.

        Raises:
            RequestError: its id is in use.
            CapacityError: it could never run, or the parent does not run.
        """
        self._refuse_known(child)
        self.check_capacity(child.max_slots)
        if parent.status is not RequestStatus.RUNNING:
            raise CapacityError(f"request {parent.id!r} holds no blocks that could be shared")
        self._enlist(child, after=parent)
        self.blocks.fork(parent, child)
        child.status = RequestStatus.RUNNING
        child.forked = True
        insort(self._running, child, key=_rank)

    def schedule(self) -> Batch:
        """Return the next step's work; blocks for it are taken, from worse ranks if need be."""
        budget = Budget(self.max_batch_tokens, self.max_logit_rows)
        items: dict[str, tuple[Request, int]] = {}
        yielded = self._yield_to_better()
        preempted: list[Request] = []
        order = sorted(self._running, key=has_more_than_one_token_left)
        num_decoding = sum(not has_more_than_one_token_left(request) for request in order)
        budget.tokens = self._step_tokens(order[:num_decoding])
        for index, request in enumerate(order):
            behind = max(num_decoding - index - 1, 0)  # they come before this request's draft
            num_new = budget.share(request)
            num_new += self._place_draft(request, num_new, budget, behind)
            if num_new and self._make_room(request, num_new, preempted):
                budget.spend(request, num_new)
                items[request.id] = (request, num_new)
        for victim in preempted:
            items.pop(victim.id, None)
        if not preempted:
            self._admit(budget, items, yielded)
        copies = self.blocks.take_copies() if items else ()
        return Batch(tuple(items.values()), (*yielded, *preempted), copies)

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
        self.counters.computed_tokens += len(batch.padding)
        self.counters.padding_tokens += len(batch.padding)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks, so that it starts again when its rank is next."""
        self._running.remove(request)
        self.blocks.release(request)
        request.draft.clear()
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.counters.preemptions += 1
        insort(self._waiting, request, key=_rank)

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
        self.blocks.check_integrity(self._holders())
        if len(self._running) + len(self._waiting) != len(self._requests):
            raise AssertionError("a request is neither waiting nor running")
        for queue in (self._running, self._waiting):
            if sorted(queue, key=_rank) != queue:
                raise AssertionError("a queue is not in the order of its ranks")

    def _holders(self) -> list[Request]:
        """Return everything that holds blocks."""
        return self._running

    def _refuse_known(self, request: Request) -> None:
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is already in use", field="request_id")

    def _enlist(self, request: Request, *, after: Request | None = None) -> None:
        """Give a request its rank: behind its class, or right behind the request that it forks."""
        self._num_added += 1
        first = (request.params.priority,) if after is None else after.rank[:2]
        request.rank = (*first, self._num_added)
        self._requests[request.id] = request

    def _step_tokens(self, decoding: Sequence[Request]) -> int:
        """Return the token budget of a step in which some requests decode."""
        if not decoding or self.max_mixed_tokens is None:
            return self.max_batch_tokens
        own = sum(1 + len(request.draft) for request in decoding)
        return min(self.max_batch_tokens, own + self.max_mixed_tokens)

    def _yield_to_better(self) -> list[Request]:
        """Preempt what the first waiting request lacks from requests of a worse class."""
        request = next((r for r in self._waiting if not self._is_held(r)), None)
        if request is None or not self._running or self._running[-1].rank[0] <= request.rank[0]:
            return []
        kept = [r for r in self._running if r.rank[0] <= request.rank[0]]
        held = {block for r in kept for block in r.block_ids}
        needed = self.blocks.num_needed(request.num_tokens) + len(kept)
        if needed > self.blocks.num_blocks - len(held) or self._num_slots(kept) < 1:
            return []  # it would have to wait nevertheless
        yielded = []
        while len(self._running) > len(kept) and not self._has_place(request):
            yielded.append(self._preempt())
        return yielded

    def _has_place(self, request: Request) -> bool:
        needed = self.blocks.num_needed(request.num_tokens) + self._reserve()
        return self._num_slots(self._running) > 0 and needed <= self.blocks.num_idle

    def _num_slots(self, running: Sequence[Request]) -> int:
        """Return how many requests may be admitted beside those that run; forks do not count."""
        return self.max_running - sum(not request.forked for request in running)

    def _reserve(self) -> int:
        """Return the blocks to leave for the next step of those that run: else the newcomer loses.

        One for each whose table is not complete yet.
        """
        complete = self.blocks.num_needed
        return sum(len(r.block_ids) < complete(r.max_slots) for r in self._running)

    def _place_draft(self, request: Request, num_new: int, budget: "Budget", behind: int) -> int:
        """Drop what there is no room for from a request's draft; return what is left of it.

        A draft is a gamble: it takes idle blocks only, and none that the `behind` requests, which
        decode too, may need.
        """
        end = request.num_computed + num_new
        if not request.draft or request.status is not RequestStatus.RUNNING:
            return 0
        room = min(budget.tokens - num_new, budget.rows - 1) - behind
        room = min(room, request.max_slots - end) if end == request.num_tokens else 0
        del request.draft[max(room, 0) :]
        end += len(request.draft)
        if request.draft and not self.blocks.grow(request, end, reserve=behind):
            request.draft.clear()
        return len(request.draft)

    def _make_room(self, request: Request, num_new: int, preempted: list[Request]) -> bool:
        """Extend a request's blocks, preempting the worst rank; False if it was itself hit."""
        if request.status is not RequestStatus.RUNNING:
            return False  # preempted earlier in this step
        while not self.blocks.grow(request, request.num_computed + num_new):
            victim = self._preempt()
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self) -> Request:
        """Take the blocks of the worst-ranked running request; it starts again later."""
        victim = self._running[-1]
        self.preempt(victim)
        return victim

    def _admit(
        self,
        budget: "Budget",
        items: dict[str, tuple[Request, int]],
        yielded: Sequence[Request],
    ) -> None:
        """Start waiting requests by rank while slots, budget and blocks last."""
        index = 0
        while index < len(self._waiting):
            request = self._waiting[index]
            if self._is_held(request):
                index += 1
                continue
            if request in yielded or not self._start(request, budget, items):
                return

    def _start(
        self, request: Request, budget: "Budget", items: dict[str, tuple[Request, int]]
    ) -> bool:
        """Admit a waiting request and give it its share of the step; False if there is no room."""
        if budget.share(request) == 0:
            return False
        if not request.forked and self._num_slots(self._running) < 1:
            return False
        sibling = next((r for r in self._siblings(request) if _has_prompt_of(r, request)), None)
        if not self.blocks.admit(request, reserve=self._reserve(), sibling=sibling):
            return False
        self._run(request)
        self._count_hits(request, sibling)
        num_new = budget.share(request)
        if num_new:  # a prefix hit may leave only rows that do not fit into this step
            budget.spend(request, num_new)
            items[request.id] = (request, num_new)
        return True

    def _run(self, request: Request) -> None:
        self._waiting.remove(request)
        insort(self._running, request, key=_rank)
        request.status = RequestStatus.RUNNING

    def _is_held(self, request: Request) -> bool:
        """Tell whether to wait until an earlier sample has computed the prompt."""
        earlier = [r for r in self._siblings(request) if r.rank < request.rank]
        return bool(earlier) and not any(_has_prompt_of(r, request) for r in earlier)

    def _siblings(self, request: Request) -> list[Request]:
        """Return the running requests with the same prompt from the same source."""
        if not request.parent:
            return []
        return [r for r in self._running if r.parent == request.parent]

    def _count_hits(self, request: Request, sibling: Request | None) -> None:
        """Count prefix hits of first admissions; finding one's own blocks again is no hit."""
        if sibling is not None:
            self.counters.shared_tokens += request.num_computed
        elif not request.num_preemptions and request.use_prefix_cache:
            request.num_cached = request.num_computed
            self.counters.prefix_query_tokens += request.num_tokens
            self.counters.prefix_hit_tokens += request.num_computed


class Budget:
    """What is left of a step: tokens to compute and rows of logits."""

    def __init__(self, tokens: int, rows: int) -> None:
        self.tokens = tokens
        self.rows = rows

    def share(self, request: Request) -> int:
        """Return how many of its known remaining tokens a request may compute."""
        num_new = min(request.num_tokens - request.num_computed, self.tokens)
        excess = len(request.wanted_rows(num_new)) - self.rows
        return max(num_new - excess, 0) if excess > 0 else num_new

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


def _has_prompt_of(sibling: Request, request: Request) -> bool:
    """Tell whether a sibling has computed all of the prompt that a request could share."""
    return sibling.num_computed >= min(request.num_prompt, request.max_reusable)


def _rank(request: Request) -> tuple[int, ...]:
    return request.rank


def has_more_than_one_token_left(request: Request) -> bool:
    """Tell whether a request is not decoding: prompts and what resumes come after streams."""
    return request.num_tokens - request.num_computed > 1
