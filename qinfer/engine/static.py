"""Static batching, as textbooks describe it: the yardstick for continuous batching. Torch-free.

A batch is formed of what waits, as many as slots and blocks allow with every request at its full
length, and runs until the longest of it is done. Nobody joins meanwhile. A slot whose text has
ended goes on computing: its last token again in every step, with a row of logits, for nothing.
Only an aborted request gives its slot back, since nobody waits for its batch.
"""

from dataclasses import replace

from qinfer.engine.blocks import BlockManager
from qinfer.engine.request import FinishReason, Request, RequestStatus
from qinfer.engine.scheduler import Batch, Budget, Scheduler, has_more_than_one_token_left
from qinfer.errors import CapacityError, ConfigError, RequestError


class StaticScheduler(Scheduler):
    """Batches that are computed together from start to end; no preemption, no shared blocks.

    Args:
        blocks: the pool's books, without prefix caching.
        max_batch_tokens: tokens of one step over all requests.
        max_running: slots of a batch.
        max_logit_rows: rows of logits of one step; None = as many as tokens.
        max_queue: requests that may wait beside those that can run; None = any number.

    Raises:
        ConfigError: prefix caching is on: finished slots write into their blocks again.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch_tokens: int,
        max_running: int,
        max_logit_rows: int | None = None,
        max_queue: int | None = None,
    ) -> None:
        if blocks.enable_prefix_caching:
            raise ConfigError("static batching works without prefix caching; switch that off")
        super().__init__(
            blocks,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            max_logit_rows=max_logit_rows,
            max_queue=max_queue,
        )
        self._padding: list[Request] = []

    def check_capacity(self, num_slots: int, *, num_sequences: int = 1) -> None:
        """Refuse what could never run, however empty the pool.

        Raises:
            RequestError: there are several sequences, which need forks.
            CapacityError: `num_slots` tokens exceed the whole pool.
        """
        if num_sequences > 1:
            raise RequestError(
                "beam search needs batching=continuous: a static batch does not grow",
                field="beam_width",
            )
        super().check_capacity(num_slots, num_sequences=num_sequences)

    def fork(self, parent: Request, child: Request) -> None:
        """Refuse: a static batch does not grow.

        Raises:
            CapacityError: always.
        """
        raise CapacityError(
            f"request {parent.id!r} cannot be forked to {child.id!r}: a static batch does not "
            "grow; use batching=continuous"
        )

    def schedule(self) -> Batch:
        """Return the next step's work: of the batch that runs, or of a new one."""
        if not self._running:
            self._form_batch()
        budget = Budget(self.max_batch_tokens, self.max_logit_rows)
        items = []
        for request in sorted(self._running, key=has_more_than_one_token_left):
            num_new = budget.share(request)
            request.draft.clear()
            if num_new:
                budget.spend(request, num_new)
                items.append((request, num_new))
        padding = []
        for slot in self._padding if items else ():
            if budget.share(slot):
                budget.spend(slot, 1)
                padding.append((slot, 1))
        return Batch(tuple(items), padding=tuple(padding))

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Remove a request; its slot is computed on until the last of the batch is done."""
        pads = request.status is RequestStatus.RUNNING and reason in {"stop", "length"}
        if pads and len(self._running) > 1:
            # The token that was computed last is computed again; the slot takes the blocks over.
            end = request.num_computed
            slot = replace(
                request, tokens=request.tokens[:end], num_computed=end - 1, score_next=None
            )
            self._padding.append(slot)
            request.block_ids, request.num_computed = [], 0
        super().finish(request, reason)
        if not self._running:
            for slot in self._padding:
                self.blocks.release(slot)
            self._padding.clear()

    def _form_batch(self) -> None:
        """Fill the slots with waiting requests, by rank, as long as blocks last."""
        while self._waiting and len(self._running) < self.max_running:
            request = self._waiting[0]
            num_slots = max(request.max_slots, request.num_tokens)
            if self.blocks.num_needed(num_slots) > self.blocks.num_idle:
                return
            self.blocks.admit(request)
            self.blocks.grow(request, num_slots)
            self._run(request)

    def _holders(self) -> list[Request]:
        return self._running + self._padding
