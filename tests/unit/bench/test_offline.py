"""The offline benchmark: what it asks of an engine, and what it makes of the answers."""

from types import SimpleNamespace
from typing import Any

import pytest

from qinfer.bench.offline import WARMUP_OUTPUT_LEN, offline_method, run_offline
from qinfer.engine.llm import LLM
from qinfer.engine.request import CompletionOutput, RequestMetrics, RequestOutput
from qinfer.errors import ConfigError, QinferError


class FakeLLM:
    """Answers with given times and remembers the batches it got."""

    def __init__(self, *, failing: int = 0) -> None:
        self.config = SimpleNamespace(
            max_model_len=64,
            max_num_batched_tokens=512,
            max_num_mixed_tokens=128,
            max_num_seqs=32,
            speculative=None,
            num_speculative_tokens=4,
        )
        self.model_config = SimpleNamespace(vocab_size=50)
        self.tokenizer = SimpleNamespace(special_ids=frozenset({0, 1}))
        self.batches: list[Any] = []
        self.failing = failing

    def generate(self, prompts, params):
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        self.batches.append((ids, params))
        slow = 5.0 if len(self.batches) == 1 else 0.0  # B09: a slow start
        outputs = []
        for index, prompt in enumerate(ids):
            tokens = params.max_tokens
            if self.failing and len(self.batches) > 1:
                self.failing -= 1
                tokens = 0
            output = CompletionOutput(index, "", [2] * tokens, "length" if tokens else "error")
            metrics = RequestMetrics(slow + 0.1 * (index + 1), 0.01, slow + 0.5)
            outputs.append(RequestOutput(None, prompt, [output], metrics))
        return outputs


def measure(llm, **options):
    values: dict[str, Any] = {"input_len": 20, "output_len": 8, "concurrency": (1, 4)}
    return run_offline(llm, **values | options)


def test_batches_of_each_level():
    llm = FakeLLM()
    seen = []
    rows = measure(llm, num_requests=6, on_progress=lambda *args: seen.append(args))
    sizes = [len(ids) for ids, _ in llm.batches]
    assert sizes == [1, *[1] * 6, 4, 4, 4]  # each level: one warm-up batch, then whole batches
    assert [row.num_requests for row in rows] == [6, 8]
    assert seen[-1] == (19, 19)
    assert all(params.ignore_eos and params.temperature == 0 for _, params in llm.batches)


def test_no_prompt_comes_twice_so_a_prefix_cache_finds_nothing():
    llm = FakeLLM()
    measure(llm, num_requests=8)
    prompts = [tuple(ids) for batch, _ in llm.batches for ids in batch]
    assert len(set(prompts)) == len(prompts)
    assert {len(prompt) for prompt in prompts} == {20}
    assert not {0, 1} & {token for prompt in prompts for token in prompt}


def test_b09_warmup_is_excluded_and_declared():
    llm: Any = FakeLLM()
    (row,) = measure(llm, concurrency=(2,), num_requests=4)
    assert row.ttft.p99 < 1  # the warm-up took 5 s
    assert row.ttft.count == 4
    assert not row.ttft.p99_reliable
    assert llm.batches[0][1].max_tokens == WARMUP_OUTPUT_LEN
    method = offline_method(llm, input_len=20, output_len=8, num_requests=4, seed=0)
    assert f"{WARMUP_OUTPUT_LEN} output tokens" in method["warmup"]
    assert method["percentiles"] == "linear"
    assert "speculative" not in method
    llm.config.speculative = "ngram"
    method = offline_method(llm, input_len=20, output_len=8, num_requests=4, seed=0)
    assert method["speculative"] == "ngram, up to 4 tokens"


def test_b06_failed_requests_are_counted_and_excluded():
    (row,) = measure(FakeLLM(failing=3), concurrency=(4,), num_requests=8)
    assert (row.num_requests, row.num_failed, row.ttft.count) == (8, 3, 5)
    assert min(row.ttft.p50, row.tpot.p50) > 0
    with pytest.raises(QinferError, match="all 4 requests at concurrency 4 failed: error"):
        measure(FakeLLM(failing=4), concurrency=(4,))


@pytest.mark.parametrize(
    "options",
    [
        {"input_len": 0},
        {"output_len": 1},
        {"concurrency": ()},
        {"concurrency": (0,)},
        {"input_len": 60, "output_len": 8},
    ],
)
def test_options_that_cannot_work(options):
    with pytest.raises(ConfigError):
        measure(FakeLLM(), **options)


def test_through_the_real_engine(tiny_llama):
    with LLM(tiny_llama, threads=1) as llm:
        (row,) = measure(llm, concurrency=(3,), output_len=4)
        assert llm.core.stats().prefix_hit_tokens == 0
    assert row.num_failed == 0
    assert 0 < row.ttft.p50 < row.latency.p50
    assert row.total_tokens_per_second == pytest.approx(6 * row.output_tokens_per_second)
