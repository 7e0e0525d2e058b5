"""What the engine counts: plain numbers, for whoever exposes them. Torch-free."""

from dataclasses import dataclass, field

from qinfer.engine.request import FinishReason
from qinfer.engine.scheduler import Scheduler


@dataclass(slots=True)
class TokenCounters:
    """Totals over the life of an engine.

    Args:
        prompt_tokens: of all prompts that were added; once, whatever `n` is, as clients count them.
        generation_tokens: sampled.
        finished: requests that ended, by reason.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)

    def count_finished(self, reason: FinishReason) -> None:
        """Count one request that ended."""
        self.finished[reason] = self.finished.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment, and its totals so far.

    Args:
        running: requests that hold cache blocks.
        waiting: requests that do not, yet or for now.
        num_blocks: blocks of the cache pool.
        free_blocks: of them, those that a request could get.
        preemptions: times that a request lost its blocks.
        prefix_query_tokens: prompt tokens that were looked up in the prefix cache.
        prefix_hit_tokens: of them, those found.
        shared_tokens: prompt tokens that a sample took over from another one of its prompt.
        computed_tokens: tokens that went through the model, recomputed ones and drafts included.
        draft_tokens: of them, proposed ones.
        accepted_draft_tokens: of these, those that came true.
        padding_tokens: of the computed ones, those of finished slots of static batches.
        prompt_tokens: of all prompts that were added; once, whatever `n` is, as clients count them.
        generation_tokens: sampled.
        finished: requests that ended, by reason.
    """

    running: int
    waiting: int
    num_blocks: int
    free_blocks: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    shared_tokens: int
    computed_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    padding_tokens: int
    prompt_tokens: int
    generation_tokens: int
    finished: dict[FinishReason, int]


def snapshot(scheduler: Scheduler, tokens: TokenCounters) -> EngineStats:
    """Return the engine's numbers now."""
    counters = scheduler.counters
    return EngineStats(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        num_blocks=scheduler.blocks.num_blocks,
        free_blocks=scheduler.blocks.num_idle,
        preemptions=counters.preemptions,
        prefix_query_tokens=counters.prefix_query_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        shared_tokens=counters.shared_tokens,
        computed_tokens=counters.computed_tokens,
        draft_tokens=counters.draft_tokens,
        accepted_draft_tokens=counters.accepted_draft_tokens,
        padding_tokens=counters.padding_tokens,
        prompt_tokens=tokens.prompt_tokens,
        generation_tokens=tokens.generation_tokens,
        finished=dict(tokens.finished),
    )
