"""Random lives of requests on a small pool: what is in the cache is always what it should be."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qinfer.engine.blocks import BlockManager
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import Request, RequestStatus
from qinfer.engine.scheduler import Batch, Scheduler
from qinfer.engine.static import StaticScheduler

BLOCK_SIZE = 4
NUM_BLOCKS = 8
MAX_TOKENS = 7
MAX_RUNNING = 3


def next_token(tokens: Sequence[int], seed: int) -> int:
    """Return what a model would say: a function of all tokens before."""
    value = seed
    for token in tokens:
        value = (value * 31 + token + 1) % 10_007
    return value % 3


class Machine(RuleBasedStateMachine):
    """Arrivals, aborts and steps; a fake cache remembers what was written to each slot."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = self.make_scheduler()
        self.count = 0
        self.open: dict[str, Request] = {}
        self.texts: dict[str, list[int]] = {}  # what each request must end with
        self.cached: dict[int, tuple[int, ...]] = {}  # slot -> the tokens up to it

    def make_scheduler(self) -> Scheduler:
        blocks = BlockManager(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        return Scheduler(blocks, max_batch_tokens=MAX_TOKENS, max_running=MAX_RUNNING)

    def new_request(
        self,
        tokens: list[int],
        num_output: int,
        *,
        parent: str,
        priority: int = 0,
        use_prefix_cache: bool = True,
    ) -> Request:
        self.count += 1
        request = Request(
            id=str(self.count),
            tokens=list(tokens),
            num_prompt=len(tokens),
            params=SamplingParams(priority=priority),
            max_length=len(tokens) + num_output,
            parent=parent,
            seed=self.count,
            use_prefix_cache=use_prefix_cache,
        )
        text = list(tokens)
        while len(text) < request.max_length:
            text.append(next_token(text, request.seed))
        self.open[request.id] = request
        self.texts[request.id] = text
        return request

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        num_output=st.integers(1, 12),
        use_prefix_cache=st.booleans(),
        priority=st.integers(0, 2),
        num_samples=st.sampled_from([1, 1, 3]),
    )
    def add(
        self,
        tokens: list[int],
        num_output: int,
        use_prefix_cache: bool,
        priority: int,
        num_samples: int,
    ) -> None:
        parent = f"parent-{self.count}"
        for _ in range(num_samples):
            request = self.new_request(
                tokens,
                num_output,
                parent=parent,
                priority=priority,
                use_prefix_cache=use_prefix_cache,
            )
            self.scheduler.add(request)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.scheduler.finish(self.open.pop(name), "abort")

    @rule()
    def step(self) -> None:
        batch = self.scheduler.schedule()
        self.check_batch(batch)
        self.compute(batch)
        new = {r.id: self.accepted(r) for r, n in batch.items if r.wanted_rows(n)}
        self.scheduler.update(batch, new)
        for request, _ in batch.items:
            assert request.draft == []
            assert request.tokens == self.texts[request.id][: request.num_tokens]
            if request.num_tokens >= request.max_length:
                self.scheduler.finish(request, "length")
                del self.open[request.id]

    def check_batch(self, batch: Batch) -> None:
        assert sum(num for _, num in batch.sequences) <= MAX_TOKENS
        assert all(num >= 1 for _, num in batch.sequences)
        ids = [request.id for request, _ in batch.items]
        assert len(ids) == len(set(ids))
        assert not set(ids) & {request.id for request in batch.preempted}
        assert all(request.draft == [] for request in batch.preempted)
        assert bool(batch.items) == bool(self.open), "nothing happens though there is work"
        running = [r for r in self.open.values() if r.status is RequestStatus.RUNNING]
        assert len(running) == self.scheduler.num_running
        assert sum(not request.forked for request in running) <= MAX_RUNNING

    def compute(self, batch: Batch) -> None:
        """Copy blocks, then write a chunk for each request."""
        for source, target in batch.copies:
            for offset in range(BLOCK_SIZE):
                old = self.cached.get(source * BLOCK_SIZE + offset, ())
                self.cached[target * BLOCK_SIZE + offset] = old
        written: set[int] = set()
        for request, num_new in batch.sequences:
            assert len(request.wanted_rows(num_new)) <= 1 + len(request.draft)
            self.write(request, num_new, written)

    def write(self, request: Request, num_new: int, written: set[int]) -> None:
        """Write a chunk; what the request finds before it must be what it would have written."""
        blocks = self.scheduler.blocks
        tokens = request.tokens[: request.num_computed] + request.upcoming(num_new)
        assert len(tokens) == request.num_computed + num_new
        for position in range(len(tokens)):
            block = request.block_ids[position // BLOCK_SIZE]
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            history = tuple(tokens[: position + 1])
            if position < request.num_computed:
                assert self.cached[slot] == history
                continue
            assert slot not in written
            assert blocks._refs[block] == 1, "a shared block is written"
            assert blocks._hash_of[block] is None, "a cached block is written"
            written.add(slot)
            self.cached[slot] = history

    def accepted(self, request: Request) -> list[int]:
        """Return what the model says after a request's tokens, as far as its draft foresaw it."""
        text, start = self.texts[request.id], request.num_tokens
        count = 0
        while count < len(request.draft) and request.draft[count] == text[start + count]:
            count += 1
        return text[start : start + count + 1]

    @invariant()
    def books_are_right(self) -> None:
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        for _ in range(500):
            if not self.open:
                break
            self.step()
            self.scheduler.check_integrity()
        assert not self.open, "a request starves"
        assert self.scheduler.blocks.num_used == 0


class ContinuousMachine(Machine):
    """Beside these: forks, drafts and preemption from outside."""

    def running(self) -> list[Request]:
        found = [r for r in self.open.values() if r.status is RequestStatus.RUNNING]
        return sorted(found, key=lambda request: request.rank)

    @precondition(lambda self: self.running() and len(self.open) < 8)
    @rule(data=st.data(), last=st.integers(0, 2), num_output=st.integers(1, 8))
    def fork(self, data: st.DataObject, last: int, num_output: int) -> None:
        parent = data.draw(st.sampled_from(self.running()))
        limit = min(parent.num_computed, NUM_BLOCKS * BLOCK_SIZE - num_output)
        if limit < 1:
            return
        length = data.draw(st.integers(1, limit))
        child = self.new_request([*parent.tokens[:length], last], num_output, parent=parent.parent)
        self.scheduler.fork(parent, child)
        assert child.num_computed in {length, length + 1}  # one more where `last` is the parent's

    @precondition(lambda self: self.running())
    @rule(data=st.data(), num_right=st.integers(0, 6), num_wrong=st.integers(0, 6))
    def draft(self, data: st.DataObject, num_right: int, num_wrong: int) -> None:
        request = data.draw(st.sampled_from(self.running()))
        text = self.texts[request.id]
        request.draft = text[request.num_tokens : request.num_tokens + num_right]
        request.draft += [3] * num_wrong

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.scheduler.preempt(data.draw(st.sampled_from(self.running())))


class StaticMachine(Machine):
    """Static batches: finished slots write into blocks of their own until the batch is done."""

    def make_scheduler(self) -> Scheduler:
        blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False)
        return StaticScheduler(blocks, max_batch_tokens=MAX_TOKENS, max_running=MAX_RUNNING)

    def check_batch(self, batch: Batch) -> None:
        super().check_batch(batch)
        assert batch.preempted == ()


TestContinuous = ContinuousMachine.TestCase
TestContinuous.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStatic = StaticMachine.TestCase
TestStatic.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
