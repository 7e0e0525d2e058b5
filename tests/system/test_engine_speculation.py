"""Speculative decoding on real (tiny) models: every bit as without it."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import write_script, write_tiny
from support.quantized import quantize_directory
from support.tokenizers import byte_level, write_tokenizer

from qinfer import LLM, SamplingParams
from qinfer.engine.params import StructuredOutput
from qinfer.engine.request import CompletionOutput
from qinfer.errors import CapacityError, ConfigError
from qinfer.schemes import WeightScheme

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama at 4 bits."""
    path = write_tiny(tmp_path_factory.mktemp("draft") / "int4")
    quantize_directory(path, WeightScheme(4, 32))
    return path


def open_llm(model: Path, **options: Any) -> LLM:
    return LLM(model, **{"threads": 1, "max_num_seqs": 8} | options)


def prompt_of(seed: int, length: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": random.Random(seed).choices(range(256), k=length)}


def run(llm: LLM, prompts: Sequence[Any], params: Any) -> list[CompletionOutput]:
    results = [output for result in llm.generate(prompts, params) for output in result.outputs]
    llm.core.check_integrity()
    assert llm.core.scheduler.blocks.num_used == 0
    return results


@pytest.mark.parametrize("kv_cache_dtype", ["fp32", "int8"])
@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_tokens_and_logprobs_are_equal_to_the_bit(
    tiny_llama: Path, draft: Path, drafter: str, kv_cache_dtype: str
) -> None:
    """E02, E04, E07: greedy, drawn, penalized and `n` samples, in one batch, in chunks."""
    kinds = [
        GREEDY,
        replace(GREEDY, temperature=0.7, seed=3),
        replace(GREEDY, repetition_penalty=1.2, presence_penalty=0.3),
        replace(GREEDY, temperature=1.0, top_p=0.9, seed=5, n=2, max_tokens=20),
        replace(GREEDY, min_tokens=30, ignore_eos=False),
    ]
    # Prompts that repeat themselves, so that looking up finds something.
    prompts = [{"prompt_token_ids": prompt_of(i, 7 + i)["prompt_token_ids"] * 3} for i in range(5)]
    options = {"kv_cache_dtype": kv_cache_dtype, "max_num_batched_tokens": 24}
    with open_llm(tiny_llama, **options) as llm:
        expected = run(llm, prompts, kinds)
    name = drafter if drafter == "ngram" else str(draft)
    with open_llm(tiny_llama, **options, speculative=name) as llm:
        assert run(llm, prompts, kinds) == expected
        assert [run(llm, [p], [k]) for p, k in zip(prompts[:2], kinds[:2], strict=True)] == [
            [expected[0]],
            [expected[1]],
        ]
        stats = llm.core.stats()
        assert stats.draft_tokens > 0
        if drafter == "model":
            assert stats.accepted_draft_tokens > 0


def test_preemption_with_a_draft_model(tiny_llama: Path, draft: Path) -> None:
    """E16: the pool of both models runs out; the texts stay."""
    prompts = [prompt_of(seed, 16) for seed in (6, 7, 8)]
    params = [replace(GREEDY, max_tokens=24, temperature=1.0, seed=seed) for seed in range(3)]
    with open_llm(tiny_llama, block_size=4) as llm:
        ample = run(llm, prompts, params)
    with open_llm(tiny_llama, block_size=4, num_blocks=12, speculative=str(draft)) as llm:
        assert run(llm, prompts, params) == ample
        assert llm.core.stats().preemptions > 0


def test_structured_output_with_drafts(tiny_llama: Path, draft: Path) -> None:
    """Masks follow the accepted tokens, not the draft's."""
    params = SamplingParams(
        temperature=1.0,
        seed=1,
        max_tokens=60,
        structured=StructuredOutput(regex="(ab[0-9]){12}"),
    )
    texts = []
    for options in ({}, {"speculative": "ngram"}, {"speculative": str(draft)}):
        with open_llm(tiny_llama, **options) as llm:
            texts.append(run(llm, [prompt_of(0, 9)], params)[0])
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].text.count("ab") == 12


def test_a_text_that_repeats_itself_takes_fewer_steps(tmp_path: Path) -> None:
    """A scripted model whose output is in its prompt: lookup finds it, stop strings included."""
    model = tmp_path / "script"
    ids = write_script(model, "ABCDEFGHIJKLMNOPQRSTUVWX")
    prompt = {"prompt_token_ids": [*ids, ord("?")]}
    params = SamplingParams(temperature=0.0, max_tokens=50, stop=("QRS",))
    steps, texts = [], []
    for options in ({}, {"speculative": "ngram", "num_speculative_tokens": 4}):
        with open_llm(model, **options) as llm:
            texts.append(run(llm, [prompt, prompt], params))
            stats = llm.core.stats()
            steps.append(stats.generation_tokens - stats.accepted_draft_tokens)
    assert texts[0] == texts[1]
    assert texts[0][0].text == "ABCDEFGHIJKLMNOP"
    assert stats.accepted_draft_tokens > 0
    assert steps[1] < steps[0]


def test_a_draft_model_counts_in_the_memory_plan(tiny_llama: Path, draft: Path) -> None:
    with open_llm(tiny_llama) as llm:
        plain = llm.memory()
    with open_llm(tiny_llama, speculative=str(draft)) as llm:
        both = llm.memory()
        assert both.draft_bytes > llm.core.scheduler.blocks.num_blocks * 16
    memory = plain.weights_bytes + plain.activation_bytes + 40 * 16 * plain.kv_bytes_per_token
    with open_llm(tiny_llama, memory=memory) as llm:
        assert llm.core.scheduler.blocks.num_blocks == 40
    with pytest.raises(CapacityError):
        open_llm(tiny_llama, memory=memory, speculative=str(draft), max_model_len=128)
    assert plain.draft_bytes == 0


def test_models_that_cannot_draft_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """K12: before the weights are read, with the reason."""
    larger = write_tiny(tmp_path / "larger", vocab_size=300)
    with pytest.raises(ConfigError, match="300 tokens and the model 288"):
        open_llm(tiny_llama, speculative=str(larger))
    other = write_tiny(tmp_path / "other")
    write_tokenizer(other, byte_level([65, 66]))
    with pytest.raises(ConfigError, match="another tokenizer: token 26"):
        open_llm(tiny_llama, speculative=str(other))
