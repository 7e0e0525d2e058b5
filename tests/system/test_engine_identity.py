"""The promise of the CPU engine: the same bits whatever runs beside a request.

Chunk size, prefix hits, batch mates, preemption and order must change neither tokens nor
log-probabilities nor the bytes of the cache. Everything here compares for equality, never for
closeness, on a real (tiny) model.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import load_oracle, write_tiny

from qinfer import LLM, SamplingParams, quantize
from qinfer.engine.request import CompletionOutput
from qinfer.schemes import KV_SCHEMES

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=2)
KV_DTYPES = tuple(KV_SCHEMES)


def open_llm(model: Path, **options: Any) -> LLM:
    return LLM(model, **{"threads": 1, "max_num_seqs": 16, "block_size": 16} | options)


def prompt_of(seed: int, length: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": random.Random(seed).choices(range(256), k=length)}


def run(llm: LLM, prompts: Sequence[Any], params: Any = GREEDY) -> list[CompletionOutput]:
    results = [result.outputs[0] for result in llm.generate(prompts, params)]
    llm.core.check_integrity()
    assert llm.core.scheduler.blocks.num_used == 0
    return results


def every_row(llm: LLM, sequence: list[int]) -> torch.Tensor:
    """Return the log-softmax rows of a sequence."""
    rows: list[torch.Tensor] = []

    def collect(_index: int, _position: int, values: torch.Tensor) -> None:
        rows.append(values)

    llm.score([sequence], collect)
    return torch.cat(rows)


@pytest.mark.parametrize("kv_cache_dtype", ["fp32", "int8"])
def test_sixteen_at_once_equal_solo_runs(tiny_llama: Path, kv_cache_dtype: str) -> None:
    """E01, E02: in random order, repeated; tokens and log-probabilities equal to the bit."""
    prompts = [prompt_of(seed, (1, 7, 40, 17)[seed % 4]) for seed in range(16)]
    kinds = [
        GREEDY,
        replace(GREEDY, temperature=1.0, seed=3),
        replace(GREEDY, repetition_penalty=1.3),
        replace(GREEDY, temperature=0.8, top_p=0.9, top_k=40, seed=4),
    ]
    params = [kinds[(seed // 4) % 4] for seed in range(16)]
    with open_llm(tiny_llama, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False) as llm:
        solo = [run(llm, [p], [k])[0] for p, k in zip(prompts, params, strict=True)]
        assert len({tuple(output.token_ids) for output in solo}) == 16
    options = {"kv_cache_dtype": kv_cache_dtype, "max_num_batched_tokens": 48}
    with open_llm(tiny_llama, **options) as llm:
        for repeat in range(3):
            order = random.Random(repeat).sample(range(16), 16)
            together = run(llm, [prompts[i] for i in order], [params[i] for i in order])
            assert together == [solo[i] for i in order]


def test_request_parameters_survive_an_early_leaver(tiny_llama: Path) -> None:
    """E04: greedy, seeded and penalized; one leaves early; each equals its solo run."""
    kinds = [
        replace(GREEDY, max_tokens=20),
        replace(GREEDY, temperature=1.0, seed=9, max_tokens=4),
        replace(GREEDY, repetition_penalty=5.0, max_tokens=20),
    ]
    with open_llm(tiny_llama) as llm:
        prompt = prompt_of(1, 9)
        solo = [run(llm, [prompt], [kind])[0] for kind in kinds]
        assert run(llm, [prompt] * 3, kinds) == solo
        assert solo[0].token_ids != solo[2].token_ids


@pytest.mark.parametrize("kv_cache_dtype", KV_DTYPES)
def test_the_same_prompt_three_times(tiny_llama: Path, kv_cache_dtype: str) -> None:
    """K05: hit or miss, for every KV type: the same text and log-probabilities."""
    with open_llm(tiny_llama, kv_cache_dtype=kv_cache_dtype) as llm:
        prompt = prompt_of(2, 40)
        cold = run(llm, [prompt])
        for repeat in (1, 2):
            assert run(llm, [prompt]) == cold
            assert llm.core.stats().prefix_hit_tokens == 32 * repeat
        full_blocks = prompt_of(2, 32)  # a full hit stops one token short
        assert run(llm, [full_blocks]) == run(llm, [full_blocks])
    with open_llm(tiny_llama, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False) as llm:
        assert run(llm, [prompt]) == cold
        assert llm.core.stats().prefix_hit_tokens == 0


@pytest.mark.parametrize("kv_cache_dtype", KV_DTYPES)
def test_chunks_leave_the_same_cache_and_logits(tiny_llama: Path, kv_cache_dtype: str) -> None:
    """K06: prefill 50 tokens in chunks of 50, 16 and 7: equal bytes, equal rows."""
    prompt = prompt_of(3, 50)
    results, caches, rows = [], [], []
    for chunk in (50, 16, 7):
        options = {"kv_cache_dtype": kv_cache_dtype, "max_num_batched_tokens": chunk}
        with open_llm(tiny_llama, **options) as llm:
            results.append(run(llm, [prompt], replace(GREEDY, max_tokens=1)))
            caches.append(llm._open.pool.snapshot(range(4)))
            rows.append(every_row(llm, prompt["prompt_token_ids"]))
    assert results[0] == results[1] == results[2]
    for cache, values in zip(caches[1:], rows[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(caches[0], cache, strict=True))
        assert torch.equal(rows[0], values)
    assert any(tensor.any() for tensor in caches[0])


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_decoding_sees_what_a_rerun_sees(tiny_llama: Path, kv_cache_dtype: str) -> None:
    """K09: nothing stays in full precision for a while; decode and re-run agree to the bit.

    The quantized cache must also differ from the fp32 one, or it was never read.
    """
    with open_llm(tiny_llama, kv_cache_dtype=kv_cache_dtype) as llm:
        prompt = prompt_of(4, 30)["prompt_token_ids"]
        (decoded,) = run(llm, [{"prompt_token_ids": prompt}])
        rows = every_row(llm, prompt + decoded.token_ids)
        (scores,) = llm.score([prompt + decoded.token_ids])
    assert decoded.logprobs is not None
    for offset, entry in enumerate(decoded.logprobs):
        assert entry.logprob == scores[len(prompt) - 1 + offset]
        assert entry.top[0][1] == float(rows[len(prompt) - 1 + offset].max())
    with open_llm(tiny_llama, kv_cache_dtype="fp32") as llm:
        exact = every_row(llm, prompt + decoded.token_ids)
    drift = (rows - exact).abs().amax(-1)
    assert 0 < float(drift.max()) < 0.2
    assert float(drift[1]) > 0  # in prefill too, not only in decode


def test_first_and_later_answers_are_the_same(tiny_llama: Path) -> None:
    """K03: nothing freezes on the first request."""
    prompt = prompt_of(5, 25)
    with open_llm(tiny_llama, kv_cache_dtype="int8") as llm:
        first = run(llm, [prompt])
    with open_llm(tiny_llama, kv_cache_dtype="int8") as llm:
        for seed in range(10, 20):
            run(llm, [prompt_of(seed, 20)], replace(GREEDY, max_tokens=3))
        assert run(llm, [prompt]) == first


def test_preemption_changes_no_text(tiny_llama: Path) -> None:
    """E16: three requests of 16 + 24 tokens in 12 blocks of 4, as with ample memory."""
    prompts = [prompt_of(seed, 16) for seed in (6, 7, 8)]
    params = [replace(GREEDY, max_tokens=24, temperature=1.0, seed=seed) for seed in range(3)]
    with open_llm(tiny_llama, block_size=4) as llm:
        ample = run(llm, prompts, params)
        assert llm.core.stats().preemptions == 0
        report = llm.memory()
    memory = report.weights_bytes + report.activation_bytes + 48 * report.kv_bytes_per_token
    with open_llm(tiny_llama, block_size=4, memory=memory) as llm:
        assert llm.core.scheduler.blocks.num_blocks == 12
        assert run(llm, prompts, params) == ample
        stats = llm.core.stats()
        assert stats.preemptions > 0
        assert stats.prefix_hit_tokens == 0
        assert stats.generation_tokens == 72


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_other_families_keep_the_promise(tmp_path: Path, family: str) -> None:
    """E02 with a sliding window, biases and qk-norm; greedy tokens are those of transformers."""
    overrides: dict[str, Any] = {"sliding_window": 20} if family == "mistral" else {}
    model = write_tiny(tmp_path / "model", family, **overrides)
    prompts = [prompt_of(seed, 40) for seed in range(4)]
    with open_llm(model, kv_cache_dtype="fp32", max_num_batched_tokens=23) as llm:
        together = run(llm, prompts)
        assert [run(llm, [prompt])[0] for prompt in prompts] == together
    oracle = load_oracle(model)
    tokens = prompts[0]["prompt_token_ids"] + together[0].token_ids
    with torch.inference_mode():
        logits = oracle(torch.tensor([tokens])).logits[0, 39:-1]
    assert logits.argmax(-1).tolist() == together[0].token_ids


def test_any_weight_format_with_any_kv_format(tiny_llama: Path, tmp_path: Path) -> None:
    """K15, K12: 3 x 4 formats, each independent of the other, with and without prefix cache."""
    models = {"dense": tiny_llama}
    for weights in ("int4", "int8"):
        models[weights] = tmp_path / weights
        quantize(tiny_llama, models[weights], weights=weights, algorithm="rtn", group_size=32)
    texts = {}
    for name, model in models.items():
        for kv_cache_dtype in ("fp32", "bf16", "int8", "fp8"):
            with open_llm(model, kv_cache_dtype=kv_cache_dtype) as llm:
                prompts = [prompt_of(seed, 20) for seed in range(2)]
                together = run(llm, prompts)
                assert [run(llm, [prompt])[0] for prompt in prompts] == together
                texts[name, kv_cache_dtype] = together
    assert texts["dense", "fp32"] != texts["int4", "fp32"]
    with open_llm(models["int4"]) as llm:
        assert llm.config.kv_cache_dtype == "int8"  # recorded by quantize


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_many_short_requests_leave_nothing_behind(tiny_llama: Path) -> None:
    """E19: 200 short requests: resident memory flat after the first 50, books empty."""

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * 4096

    params = SamplingParams(temperature=1.0, max_tokens=3, repetition_penalty=1.1, n=2)
    with open_llm(tiny_llama, max_num_seqs=16) as llm:
        baseline = 0
        for batch in range(20):
            llm.generate([prompt_of(batch * 10 + i, 9) for i in range(10)], params)
            if batch == 4:
                baseline = resident()
        assert resident() - baseline < 16 << 20
        assert not llm.core._jobs
        assert not llm.core._groups
        llm.core.check_integrity()
        assert llm.core.stats().finished["length"] + llm.core.stats().finished.get("stop", 0) == 400
