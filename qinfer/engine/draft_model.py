"""A smaller model as drafter, with a cache of its own.

It follows the requests at its own pace: what it has not computed yet (a prompt, or what came while
drafting did not pay) it catches up with in chunks, and only then drafts. Tokens of a draft that
turned out wrong are taken back by computing over them.

It chooses as the request does: greedily, or with the same temperature, filters and random number.
Where both models give similar distributions one number leads both to the same token; the draft is
then right about as often as the distributions overlap.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qinfer.engine.batch import build
from qinfer.engine.blocks import BlockManager
from qinfer.engine.request import Request
from qinfer.engine.runner import ModelRunner
from qinfer.engine.sampler import Sampler, SamplerState
from qinfer.engine.scheduler import Batch
from qinfer.kvcache.inputs import ModelOutput

# Known tokens that drafting starts with: the newest, and the one before if a draft was all right.
_MAX_START = 2
# Tokens to catch up with, per token that a request may still get, beyond which that cannot pay.
_MAX_CATCH_UP = 4


@dataclass(slots=True)
class _Sequence:
    """A request as the draft model sees it.

    Args:
        request: a copy whose tokens end in the latest draft; its blocks are of the drafter's pool.
        sampler: chooses its tokens.
        num_known: leading tokens that are the request's own.
        num_shared: leading tokens whose blocks are in the prefix cache.
    """

    request: Request
    sampler: SamplerState
    num_known: int
    num_shared: int


class ModelDrafter:
    """Drafts with a model.

    Args:
        runner: computes it.
        blocks: the books of the runner's pool.
        sampler: for its rows of logits.
        max_batch_tokens: tokens of one step at most.
        max_positions: tokens of a sequence that the model can take.
        device: where the runner's tensors live.
    """

    def __init__(
        self,
        runner: ModelRunner,
        blocks: BlockManager,
        sampler: Sampler,
        *,
        max_batch_tokens: int,
        max_positions: int,
        device: str = "cpu",
    ) -> None:
        self._runner = runner
        self._blocks = blocks
        self._sampler = sampler
        self._max_batch_tokens = max_batch_tokens
        self._max_positions = max_positions
        self._device = device
        self._sequences: dict[str, _Sequence] = {}

    def prepare(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Compute a step's worth of what is missing; return the requests of which nothing is."""
        names = {request.id for request in requests}
        ready, items, room = [], [], self._max_batch_tokens
        behind: set[str] = set()  # prompts that a first sample is still computing
        for request in requests:
            if request.parent in behind and request.id not in self._sequences:
                continue  # later it finds the prompt in the cache
            sequence = self._follow(request, names)
            if sequence is None:
                continue
            missing = max(sequence.num_tokens - sequence.num_computed - _MAX_START, 0)
            if missing > _MAX_CATCH_UP * (request.max_length - request.num_tokens):
                continue
            num_new = min(missing, room)
            if missing:
                behind.add(request.parent)
            if num_new:
                room -= num_new
                items.append((sequence, num_new))
            if num_new == missing:
                ready.append(request)
        if items:
            self._run(items)
        return ready[: self._max_batch_tokens // _MAX_START]

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        """Return what the model would say next; shorter where its cache is full."""
        drafts: list[list[int]] = [[] for _ in requests]
        going = [index for index, length in enumerate(lengths) if length]
        while going:
            sequences = [self._sequences[requests[index].id] for index in going]
            items = [(s.request, s.request.num_tokens - s.request.num_computed) for s in sequences]
            output = self._run(items)
            finite = [row for row, bad in enumerate(output.bad_layers.tolist()) if bad < 0]
            choices = self._sampler.sample(
                output, [(row, sequences[row].sampler) for row in finite]
            )
            going_on = []
            for row, choice in zip(finite, choices, strict=True):
                if choice.error is None:
                    drafts[going[row]].append(choice.token_id)
                    sequences[row].request.tokens.append(choice.token_id)
                    if len(drafts[going[row]]) < lengths[going[row]] and self._grow(sequences[row]):
                        going_on.append(going[row])
            going = going_on
        return drafts

    def forget(self, request_id: str) -> None:
        """Let go of a request that has ended."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._blocks.release(sequence.request)

    def check_integrity(self) -> None:
        """Verify the books of the cache; for tests.

        Raises:
            AssertionError: they are wrong.
        """
        self._blocks.check_integrity(entry.request for entry in self._sequences.values())

    def _follow(self, request: Request, names: set[str]) -> Request | None:
        """Return the drafter's copy of a request, up to date; None if it cannot be followed."""
        if request.max_length > self._max_positions:
            return None
        sequence = self._sequences.get(request.id) or self._start(request)
        if sequence is None:
            return None
        copy = sequence.request
        known = sequence.num_known
        while known < min(copy.num_tokens, request.num_tokens) and (
            copy.tokens[known] == request.tokens[known]
        ):
            known += 1
        copy.tokens[known:] = request.tokens[known:]
        sequence.num_known = request.num_tokens
        copy.num_computed = min(copy.num_computed, known, request.num_tokens - 1)
        self._blocks.commit(copy, copy.num_computed - sequence.num_shared)
        sequence.num_shared = max(sequence.num_shared, copy.num_computed)
        if self._grow(sequence):
            return copy
        for other in self._sequences.keys() - names:  # they wait, or do not draft now
            self.forget(other)
        if self._grow(sequence):
            return copy
        self.forget(request.id)
        return None

    def _start(self, request: Request) -> _Sequence | None:
        """Begin to follow a request; None if the cache has no room for it."""
        copy = replace(
            request,
            tokens=list(request.tokens),
            params=replace(
                request.params,  # no history, which would remember wrong drafts; no grammar
                repetition_penalty=1.0,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                structured=None,
                logprobs=None,
                prompt_logprobs=None,
            ),
            use_prefix_cache=True,
            draft=[],
            block_ids=[],
            block_hashes=[],
            num_computed=0,
        )
        if not self._blocks.admit(copy):
            return None
        sequence = _Sequence(
            copy, self._sampler.start(copy), copy.num_tokens, num_shared=copy.num_computed
        )
        self._sequences[request.id] = sequence
        return sequence

    def _grow(self, sequence: _Sequence) -> bool:
        return self._blocks.grow(sequence.request, sequence.request.num_tokens)

    def _run(self, items: list[tuple[Request, int]]) -> ModelOutput:
        """Compute tokens of some sequences."""
        batch = Batch(tuple(items))
        self._runner.copy_blocks(self._blocks.take_copies())
        output = self._runner.run(build(batch, self._blocks.block_size, self._device))
        for request, num_new in items:
            request.num_computed += num_new
        return output
