"""An engine without a model: logits are a function of every token that the cache holds.

The fake runner writes token ids to slots and reads each sequence back through its block table, so
a wrong block, a lost token or a stale one changes the answer.
"""

import random
from collections.abc import Sequence

import torch

from qinfer.engine.admission import Limits
from qinfer.engine.blocks import BlockManager
from qinfer.engine.core import EngineCore
from qinfer.engine.request import TokenEvent
from qinfer.engine.scheduler import Scheduler
from qinfer.engine.speculation import Speculator
from qinfer.engine.static import StaticScheduler
from qinfer.kvcache.inputs import ModelInputs, ModelOutput

VOCAB = 64
EOS = 63
BLOCK_SIZE = 4


class ByteTokenizer:
    """Ids are bytes; `EOS` and the id before it are special."""

    special_ids = frozenset({EOS, EOS - 1})
    vocab_size = VOCAB

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [byte - 32 for byte in text.encode()]

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id + 32])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", "replace")


class FakeRunner:
    """Logits drawn from a generator that the whole sequence seeds.

    Args:
        num_slots: size of the cache in tokens.
        poison: a token that makes every row after it non-finite, in layer 1.
    """

    def __init__(self, num_slots: int, *, vocab_size: int = VOCAB, poison: int | None = None):
        self.cache = torch.full((num_slots,), -1)
        self.vocab_size = vocab_size
        self.num_threads = 1
        self.poison = poison
        self.num_tokens: list[int] = []  # of each step
        self.inputs: list[ModelInputs] = []

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        slots = self.cache.view(-1, BLOCK_SIZE)
        for source, target in copies:
            slots[target] = slots[source]

    def run(self, inputs: ModelInputs) -> ModelOutput:
        self.inputs.append(inputs)
        self.num_tokens.append(len(inputs.token_ids))
        self.cache[inputs.slots] = inputs.token_ids
        histories = [self._history(inputs, int(row)) for row in inputs.logit_rows]
        rows = [self.logits(history) for history in histories]
        bad = [1 if self.poison in history else -1 for history in histories]
        logits = torch.stack(rows) if rows else torch.zeros(0, self.vocab_size)
        return ModelOutput(logits, torch.tensor(bad, dtype=torch.int64))

    def logits(self, history: Sequence[int]) -> torch.Tensor:
        seed = 0
        for token in history:
            seed = (seed * 1_000_003 + token + 1) % (2**61 - 1)
        return torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(seed)) * 3

    def layer_name(self, index: int) -> str:
        return f"model.layers.{index}"

    def _history(self, inputs: ModelInputs, row: int) -> list[int]:
        sequence = int(torch.searchsorted(inputs.query_starts, row, right=True)) - 1
        start = int(inputs.query_starts[sequence])
        end = int(inputs.query_starts[sequence + 1])
        first = int(inputs.seq_lens[sequence]) - (end - start)
        position = int(inputs.positions[row])
        assert position == first + row - start
        places = torch.arange(position + 1)
        blocks = inputs.block_tables[sequence, places // BLOCK_SIZE]
        tokens: list[int] = self.cache[blocks * BLOCK_SIZE + places % BLOCK_SIZE].tolist()
        return tokens


def prompt_of(seed: int, length: int) -> list[int]:
    """Return tokens of a prompt that the fake model takes."""
    return random.Random(seed).choices(range(60), k=length)


class Ticks:
    """A clock on which every step takes the same time, so that drafting always pays."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make_core(
    *,
    num_blocks: int = 64,
    max_batch_tokens: int = 16,
    max_running: int = 4,
    max_model_len: int = 128,
    max_logit_rows: int | None = None,
    max_queue: int | None = None,
    batching: str = "continuous",
    enable_prefix_caching: bool = True,
    seed: int | None = None,
    poison: int | None = None,
    limits: Limits | None = None,
    vocab_size: int = VOCAB,
    runner_class: type[FakeRunner] = FakeRunner,
    speculator: Speculator | None = None,
) -> tuple[EngineCore, FakeRunner]:
    runner = runner_class(num_blocks * BLOCK_SIZE, vocab_size=vocab_size, poison=poison)
    blocks = BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=enable_prefix_caching)
    kind = StaticScheduler if batching == "static" else Scheduler
    scheduler = kind(
        blocks,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_logit_rows=max_logit_rows,
        max_queue=max_queue,
    )
    limits = limits or Limits(max_model_len, vocab_size, eos_ids=frozenset({EOS}))
    core = EngineCore(runner, scheduler, ByteTokenizer(), limits, seed=seed, speculator=speculator)
    return core, runner


def drain(core: EngineCore, *, max_steps: int = 10_000) -> list[TokenEvent]:
    """Step until nothing is left; the books must be right after every step."""
    events: list[TokenEvent] = []
    for _ in range(max_steps):
        if not core.has_unfinished:
            core.check_integrity()
            assert core.scheduler.blocks.num_used == 0
            return events
        events += core.step()
        core.check_integrity()
    raise AssertionError(f"not finished after {max_steps} steps")


def outputs(events: Sequence[TokenEvent]) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of every (request, sample)."""
    result: dict[tuple[str, int], list[int]] = {}
    for event in events:
        result.setdefault((event.request_id, event.index), []).extend(event.token_ids)
    return result
