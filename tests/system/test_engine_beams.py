"""`LLM.beam_search` on real (tiny) models, against transformers' `generate`."""

import random
from pathlib import Path
from typing import Any

import pytest
from support.beams import search_with_transformers
from support.checkpoints import load_oracle, write_tiny
from support.tokenizers import EOS, IM_END

from qinfer import LLM, BeamParams, SamplingParams
from qinfer.errors import CapacityError, RequestError


def open_llm(model: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"threads": 1, "max_num_seqs": 8, "kv_cache_dtype": "fp32"}
    return LLM(model, **defaults | options)


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


@pytest.mark.parametrize(
    ("family", "seed", "params"),
    [
        ("llama", 0, BeamParams(beam_width=4, num_return_sequences=4, max_tokens=12)),
        ("llama", 3, BeamParams(beam_width=3, num_return_sequences=2, early_stopping=True)),
        ("qwen2", 1, BeamParams(beam_width=5, num_return_sequences=5, length_penalty=-1.0)),
        ("qwen3", 2, BeamParams(beam_width=4, early_stopping="never", length_penalty=2.0)),
    ],
)
def test_sequences_and_scores_are_those_of_transformers(
    tmp_path: Path, family: str, seed: int, params: BeamParams
) -> None:
    model = write_tiny(tmp_path / "model", family, seed=seed)
    prompts = [prompt_of(10 * seed + i, 5 + 20 * i) for i in range(2)]
    with open_llm(model, max_num_batched_tokens=16) as llm:
        results = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
        llm.core.check_integrity()
        assert llm.core.scheduler.blocks.num_used == 0
    oracle = load_oracle(model)
    for prompt, result in zip(prompts, results, strict=True):
        wanted = search_with_transformers(oracle, prompt, params, {EOS, IM_END})
        assert [output.token_ids for output in result.outputs] == [tokens for tokens, _ in wanted]
        for output, (_, score) in zip(result.outputs, wanted, strict=True):
            assert output.score == pytest.approx(score, abs=1e-3)
            assert output.logprobs is None


def test_beams_are_the_same_to_the_bit_in_a_crowd_and_in_a_small_pool(tiny_llama: Path) -> None:
    """E02, E16: beside samples, with forks, copies and preemption; an int8 cache copies scales."""
    params = BeamParams(beam_width=3, num_return_sequences=3, max_tokens=20)
    prompts = [{"prompt_token_ids": prompt_of(seed, 17)} for seed in range(3)]
    with open_llm(tiny_llama, kv_cache_dtype="int8", block_size=4) as llm:
        alone = [llm.beam_search(prompt, params)[0].outputs for prompt in prompts]
    small = {"num_blocks": 30, "max_num_batched_tokens": 8, "enable_prefix_caching": False}
    with open_llm(tiny_llama, kv_cache_dtype="int8", block_size=4, **small) as llm:
        results = llm.beam_search(prompts, params)
        assert llm.core.stats().preemptions > 0
    for outputs, result in zip(alone, results, strict=True):
        assert result.outputs == outputs


def test_text_metrics_and_refusals(script_model: Path) -> None:
    with open_llm(script_model) as llm:
        (result,) = llm.beam_search("?", BeamParams(beam_width=2, max_tokens=30))
        assert result.outputs[0].text == "ABCDEFGHIJK"
        assert result.outputs[0].finish_reason == "stop"
        assert result.outputs[0].score == pytest.approx(0.0, abs=1e-4)
        assert result.metrics.tpot is None  # all tokens come at once
        assert result.metrics.ttft == result.metrics.latency
        assert (
            llm.generate("?", SamplingParams(temperature=0.0, max_tokens=5))[0].outputs[0].score
            is None
        )
        with pytest.raises(RequestError, match="the context holds"):
            llm.beam_search("?", BeamParams(max_tokens=10_000))
    with (
        open_llm(script_model, num_blocks=2, max_model_len=32) as llm,
        pytest.raises(CapacityError, match="4 times"),
    ):
        llm.beam_search("?", BeamParams(beam_width=4, max_tokens=20))
