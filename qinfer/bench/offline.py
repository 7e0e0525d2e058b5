"""The offline benchmark: batches of random prompts through `LLM.generate`, no HTTP in between.

Each concurrency level runs closed batches: `concurrency` requests arrive at once, and the next
batch starts when the last of them is done. So a level's TTFT includes waiting for batch mates.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qinfer.bench.stats import PERCENTILE_METHOD, Percentiles, percentiles
from qinfer.bench.workload import RandomPrompts
from qinfer.engine.llm import LLM
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import RequestOutput
from qinfer.errors import ConfigError, QinferError

WARMUP_OUTPUT_LEN = 4


@dataclass(frozen=True, slots=True)
class BenchRow:
    """The figures of one concurrency level; times in seconds.

    Args:
        concurrency: requests that arrive at once.
        input_len: prompt tokens of each.
        output_len: generated tokens of each (EOS is ignored).
        num_requests: measured requests; the failed ones are counted apart.
        ttft: arrival to first token.
        tpot: (last token - first token) / (tokens - 1), per request.
        latency: arrival to last token.
        output_tokens_per_second: generated tokens of all requests over the wall time.
        total_tokens_per_second: prompt and generated tokens over the wall time.
        num_failed: requests that ended with an error; in no other figure.
    """

    concurrency: int
    input_len: int
    output_len: int
    num_requests: int
    ttft: Percentiles
    tpot: Percentiles
    latency: Percentiles
    output_tokens_per_second: float
    total_tokens_per_second: float
    num_failed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the row for a JSON record."""
        return {
            "concurrency": self.concurrency,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "num_requests": self.num_requests,
            "num_failed": self.num_failed,
            "ttft_seconds": self.ttft.to_dict(),
            "tpot_seconds": self.tpot.to_dict(),
            "latency_seconds": self.latency.to_dict(),
            "output_tokens_per_second": self.output_tokens_per_second,
            "total_tokens_per_second": self.total_tokens_per_second,
        }


def run_offline(
    llm: LLM,
    *,
    input_len: int,
    output_len: int,
    concurrency: Sequence[int],
    num_requests: int | None = None,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[BenchRow]:
    """Measure `llm` at each concurrency level and return one row per level, in the given order.

    Every level first runs one batch of its own size with `WARMUP_OUTPUT_LEN` output tokens, which
    is not measured. All prompts of the run differ, so a prefix cache does not falsify it.

    Args:
        llm: the engine; decoding is greedy and ignores EOS.
        input_len: prompt tokens per request.
        output_len: generated tokens per request, at least 2 (one token has no TPOT).
        concurrency: the levels.
        num_requests: measured requests per level, rounded up to whole batches; None = one batch.
        seed: of the prompts.
        on_progress: called with (requests done, requests in all), warm-up included.

    Raises:
        ConfigError: an option that cannot work, such as lengths beyond the model's context.
        QinferError: every request of a level failed.
    """
    _check(llm, input_len, output_len, concurrency)
    prompts = RandomPrompts(
        llm.model_config.vocab_size, excluded=llm.tokenizer.special_ids, seed=seed
    )
    num_batches = [_num_batches(level, num_requests) for level in concurrency]
    progress = _Progress(
        sum(level * (n + 1) for level, n in zip(concurrency, num_batches, strict=True)), on_progress
    )
    rows = []
    for level, batches in zip(concurrency, num_batches, strict=True):
        _run_batch(llm, prompts.take(level, input_len), min(output_len, WARMUP_OUTPUT_LEN))
        progress.add(level)
        outputs: list[RequestOutput] = []
        seconds = 0.0
        for _ in range(batches):
            batch = prompts.take(level, input_len)
            start = time.perf_counter()
            outputs += _run_batch(llm, batch, output_len)
            seconds += time.perf_counter() - start
            progress.add(level)
        rows.append(_row(level, input_len, output_len, outputs, seconds))
    return rows


def offline_method(
    llm: LLM, *, input_len: int, output_len: int, num_requests: int | None, seed: int
) -> dict[str, Any]:
    """Return how `run_offline` measures: what two records must agree in to be compared."""
    return {
        "benchmark": "offline",
        "batching": "closed batches: `concurrency` requests at once",
        "input_len": input_len,
        "output_len": output_len,
        "num_requests": num_requests,
        "prompts": "uniform random tokens without specials, all different",
        "seed": seed,
        "sampling": "greedy, EOS ignored",
        "warmup": f"one batch per level with {min(output_len, WARMUP_OUTPUT_LEN)} output tokens, "
        "not measured",
        "ttft": "arrival to first token",
        "tpot": "(last - first) / (tokens - 1)",
        "percentiles": PERCENTILE_METHOD,
        "max_num_batched_tokens": llm.config.max_num_batched_tokens,
        "max_num_mixed_tokens": llm.config.max_num_mixed_tokens,
        "max_num_seqs": llm.config.max_num_seqs,
    } | _speculation(llm)


def _speculation(llm: LLM) -> dict[str, str]:
    """Return how tokens are drafted, if they are."""
    config = llm.config
    if config.speculative is None:
        return {}
    return {"speculative": f"{config.speculative}, up to {config.num_speculative_tokens} tokens"}


class _Progress:
    """Adds up finished requests and reports them."""

    def __init__(self, total: int, report: Callable[[int, int], None] | None) -> None:
        self._done = 0
        self._total = total
        self._report = report

    def add(self, count: int) -> None:
        self._done += count
        if self._report is not None:
            self._report(self._done, self._total)


def _check(llm: LLM, input_len: int, output_len: int, concurrency: Sequence[int]) -> None:
    if input_len < 1:
        raise ConfigError(f"input length is {input_len}; it must be at least 1")
    if output_len < 2:
        raise ConfigError(f"output length is {output_len}; it must be at least 2, TPOT needs two")
    if not concurrency or min(concurrency) < 1:
        raise ConfigError(f"concurrency {list(concurrency)} must be one or more positive numbers")
    limit = llm.config.max_model_len
    if limit is not None and input_len + output_len > limit:
        raise ConfigError(
            f"input length {input_len} + output length {output_len} exceed the context of {limit}"
        )


def _num_batches(concurrency: int, num_requests: int | None) -> int:
    return 1 if num_requests is None else max(1, -(-num_requests // concurrency))


def _run_batch(llm: LLM, prompts: list[list[int]], output_len: int) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)


def _row(
    concurrency: int,
    input_len: int,
    output_len: int,
    outputs: Sequence[RequestOutput],
    seconds: float,
) -> BenchRow:
    good = [o.metrics for o in outputs if len(o.outputs[0].token_ids) == output_len]
    if not good:
        reasons = sorted({o.outputs[0].finish_reason for o in outputs})
        raise QinferError(
            f"all {len(outputs)} requests at concurrency {concurrency} failed: "
            + ", ".join(reasons)
        )
    return BenchRow(
        concurrency=concurrency,
        input_len=input_len,
        output_len=output_len,
        num_requests=len(outputs),
        ttft=percentiles([m.ttft for m in good if m.ttft is not None]),
        tpot=percentiles([m.tpot for m in good if m.tpot is not None]),
        latency=percentiles([m.latency for m in good]),
        output_tokens_per_second=len(good) * output_len / seconds,
        total_tokens_per_second=len(good) * (input_len + output_len) / seconds,
        num_failed=len(outputs) - len(good),
    )
