"""The offline API on real (tiny) checkpoints: answers, defaults, refusals, reports."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json, load_oracle, write_script, write_tiny
from support.tokenizers import BOS, EOS, write_tokenizer

from qinfer import LLM, SamplingParams
from qinfer.engine.request import RequestOutput
from qinfer.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    NonFiniteError,
    QinferError,
    RequestError,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(tiny_llama, threads=1, max_num_seqs=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def script(script_model: Path) -> Iterator[LLM]:
    with LLM(script_model, threads=1, max_num_seqs=4) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test the books are right and no block is held."""
    yield
    for name in ("llm", "script"):
        if name in request.fixturenames:
            core = request.getfixturevalue(name).core
            core.check_integrity()
            assert not core.has_unfinished
            assert core.scheduler.blocks.num_used == 0


def ids(tokens: list[int]) -> dict[str, list[int]]:
    return {"prompt_token_ids": tokens}


def only(outputs: list[RequestOutput]) -> tuple[str, str]:
    (output,) = outputs
    return output.outputs[0].text, output.outputs[0].finish_reason


def test_greedy_tokens_are_those_of_transformers(tiny_llama: Path, llm: LLM) -> None:
    """E01: prompts of 1, 7 and 40 tokens in one batch, with EOS inside a prompt."""
    oracle = load_oracle(tiny_llama)
    prompts = [[5], [9, EOS, 3, 200, BOS, 7, 8], [(7 * i) % 250 for i in range(40)]]
    results = llm.generate([ids(prompt) for prompt in prompts], GREEDY)
    for prompt, result in zip(prompts, results, strict=True):
        tokens = list(prompt)
        for _ in range(12):
            with torch.inference_mode():
                logits = oracle(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
        assert result.outputs[0].token_ids == tokens[len(prompt) :]


def test_scores_are_those_of_transformers(tiny_llama: Path, llm: LLM) -> None:
    sequences = [[(11 * i) % 250 for i in range(n)] for n in (2, 33, 128)]
    rows: dict[int, list[torch.Tensor]] = {}

    def collect(index: int, position: int, values: torch.Tensor) -> None:
        assert position == sum(row.shape[0] for row in rows.get(index, []))
        rows.setdefault(index, []).append(values)

    scores = llm.score(sequences, collect)
    oracle = load_oracle(tiny_llama)
    for index, sequence in enumerate(sequences):
        with torch.inference_mode():
            expected = oracle(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(torch.cat(rows[index]), expected, atol=1e-4, rtol=0)
        chosen = expected.gather(1, torch.tensor(sequence[1:])[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(scores[index]), chosen, atol=1e-4, rtol=0)


def test_scores_from_a_start_with_cached_context(llm: LLM) -> None:
    sequence = [(3 * i) % 250 for i in range(60)]
    (full,) = llm.score([sequence])
    for use_prefix_cache in (False, True):
        (tail,) = llm.score([sequence], starts=[40], use_prefix_cache=use_prefix_cache)
        assert tail == full[39:]
    assert llm.score([[5], sequence[:2]]) == [[], full[:1]]
    assert llm.score([]) == []


@pytest.mark.parametrize(
    "prompts", ["abc", ["abc"], ids([97, 98, 99]), [ids([97, 98, 99])], ("abc",)]
)
def test_spellings_of_a_prompt(llm: LLM, prompts: Any) -> None:
    (output,) = llm.generate(prompts, GREEDY)
    assert output.prompt_token_ids == [97, 98, 99]
    assert output.prompt == ("abc" if "abc" in prompts else None)
    assert output.outputs[0].token_ids == llm.generate("abc", GREEDY)[0].outputs[0].token_ids


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """E18: two calls on one engine, results of different lengths, nothing mixed up."""
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    texts = ["one", "two", "three"]
    for _ in range(2):
        results = llm.generate(texts, params)
        assert [result.prompt for result in results] == texts
        assert [len(result.outputs[0].token_ids) for result in results] == [9, 1, 5]
        alone = [llm.generate(t, p)[0].outputs for t, p in zip(texts, params, strict=True)]
        assert [result.outputs for result in results] == alone


def test_one_set_of_parameters_per_prompt(llm: LLM) -> None:
    with pytest.raises(RequestError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    assert llm.generate([], GREEDY) == []


def test_metrics_and_progress(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    results = llm.generate(["a", "bc"], GREEDY, on_progress=lambda *at: seen.append(at))
    assert seen == [(1, 2), (2, 2)]
    for result in results:
        metrics = result.metrics
        assert metrics.ttft is not None
        assert metrics.tpot is not None
        assert metrics.latency == pytest.approx(metrics.ttft + 11 * metrics.tpot)
    (one,) = llm.generate("a", SamplingParams(max_tokens=1))
    assert one.metrics.ttft == one.metrics.latency
    assert one.metrics.tpot is None


@pytest.mark.parametrize("prompt", ["", ids([])])
def test_empty_prompt_starts_from_bos(llm: LLM, prompt: Any) -> None:
    """E12."""
    (output,) = llm.generate([prompt], GREEDY)
    assert output.prompt_token_ids == [BOS]
    assert output.outputs[0].token_ids == llm.generate(ids([BOS]), GREEDY)[0].outputs[0].token_ids


def test_empty_prompt_without_a_bos_is_refused(tmp_path: Path) -> None:
    """E12: then a normal request still answers."""
    model = write_tiny(tmp_path / "model")
    edit_json(model / "tokenizer_config.json", bos_token=None)
    with LLM(model, threads=1) as llm:
        for prompt in ("", ids([])):
            with pytest.raises(RequestError, match="empty"):
                llm.generate(["fine", prompt], GREEDY)
        assert only(llm.generate("fine", GREEDY))[1] == "length"
        llm.core.check_integrity()


def test_zero_tokens(llm: LLM) -> None:
    """E12."""
    (output,) = llm.generate("abc", SamplingParams(max_tokens=0))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "length")
    assert output.metrics.ttft is None
    with pytest.raises(RequestError, match="messages is empty"):
        llm.chat([])
    with pytest.raises(RequestError, match="non-empty list"):
        llm.chat([[], []])


@pytest.mark.parametrize("num_prompt", [127, 128, 129])
@pytest.mark.parametrize("max_tokens", [None, 1, 64])
def test_context_limit(llm: LLM, num_prompt: int, max_tokens: int | None) -> None:
    """E13, E14: admitted only if it fits, and the last position is reached."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    prompt = ids([5] * num_prompt)
    if num_prompt == 127 and max_tokens != 64:
        assert len(llm.generate(prompt, params)[0].outputs[0].token_ids) == 1
        return
    with pytest.raises(ContextLengthError, match=f"{num_prompt} tokens"):
        llm.generate(["fine", prompt], params if max_tokens != 64 else GREEDY)


def test_running_into_the_limit_ends_with_length(llm: LLM) -> None:
    """E14: crossing the last position in mid-decode is no garbage and no crash."""
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate(ids([5, 6]), params)
    assert len(output.outputs[0].token_ids) == 126
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(ContextLengthError, match="129 tokens"):
        llm.score([[5] * 129])


def test_rope_table_covers_the_admitted_length(tiny_llama: Path) -> None:
    """E14: `max_model_len` 256 on a model of 128 positions is refused at load."""
    with pytest.raises(ConfigError, match="beyond the 128 positions"):
        LLM(tiny_llama, max_model_len=256)
    with LLM(tiny_llama, max_model_len=20, threads=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        assert len(llm.generate("abc", params)[0].outputs[0].token_ids) == 17


def test_stop_strings_and_eos_on_scripted_output(script: LLM) -> None:
    """D01, through the real engine."""
    greedy = SamplingParams(temperature=0.0, max_tokens=30)
    assert only(script.generate(".", greedy)) == ("ABCDEFGHIJK", "stop")
    for stop, text, reason in (
        (("DEFGHIJ",), "ABC", "stop"),
        (("DEX",), "ABCDEFGHIJK", "stop"),  # EOS ends it, not the stop string
        (("CDE", "CD"), "AB", "stop"),
    ):
        assert only(script.generate(".", replace(greedy, stop=stop))) == (text, reason)
    (output,) = script.generate(".", SamplingParams(temperature=0.0, max_tokens=3))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("ABC", "length")


@pytest.mark.parametrize("skip", [True, False])
def test_stop_on_a_special_token(script: LLM, skip: bool) -> None:
    """D04: EOS ends the text without a trace of itself, and counts as a token."""
    params = SamplingParams(temperature=0.0, max_tokens=30, skip_special_tokens=skip)
    (output,) = script.generate(".", params)
    assert output.outputs[0].text == "ABCDEFGHIJK"
    assert output.outputs[0].token_ids[-1] == EOS
    params = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=(ord("D"),))
    assert only(script.generate(".", params)) == ("ABC", "stop")


@pytest.mark.parametrize("text", ["naïve", " a b", "깰x"])
def test_text_of_several_bytes_per_character(tmp_path: Path, text: str) -> None:
    """D03, D04: UTF-8 across tokens and the leading space."""
    write_script(tmp_path / "model", text)
    with LLM(tmp_path / "model", threads=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=30)
        assert only(llm.generate("\n", params)) == (text, "stop")


def test_min_tokens_masks_the_end(script: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, min_tokens=15)
    (output,) = script.generate(".", params)
    assert len(output.outputs[0].token_ids) >= 15


@pytest.mark.parametrize("temperature", [0.01, 1.0, 2.0])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_of_known_logits(tmp_path: Path, temperature: float, count: int) -> None:
    """E10: the model's own distribution at any temperature, exactly N, the chosen one there."""
    table = {65: {65: 3.0, 66: 2.5, 67: 1.0}, 66: {65: 2.0}, 67: {65: 2.0}}
    write_script(tmp_path / "model", table)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=12, logprobs=count)
    with LLM(tmp_path / "model", threads=1) as llm:
        (output,) = llm.generate(ids([65]), params)
    result = output.outputs[0]
    assert result.logprobs is not None
    assert len(result.logprobs) == len(result.token_ids)
    previous = 65
    for token, entry in zip(result.token_ids, result.logprobs, strict=True):
        logits = torch.zeros(288)
        for following, value in table.get(previous, {65: 288**0.5}).items():
            logits[following] = value
        expected = logits.log_softmax(-1)
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-4)
        assert len(entry.top) == count
        best = torch.sort(expected, descending=True, stable=True)
        assert [value for _, value in entry.top] == pytest.approx(
            best.values[:count].tolist(), abs=1e-4
        )
        previous = token


def test_defaults_come_from_generation_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """E06: top_k 1 by default, which a request can undo; logged at start."""
    model = write_tiny(tmp_path / "model")
    edit_json(model / "generation_config.json", top_k=1)
    with caplog.at_level(logging.INFO), LLM(model, threads=1) as llm:
        assert "top_k=1" in caplog.text
        quiet = [llm.generate("a", SamplingParams(temperature=2.0, seed=s)) for s in (1, 2)]
        assert only(quiet[0]) == only(quiet[1])
        free = [llm.generate("a", SamplingParams(temperature=2.0, top_k=0, seed=s)) for s in (1, 2)]
        assert only(free[0]) != only(free[1])


def test_seeds_on_a_real_model(llm: LLM) -> None:
    """E07: unseeded calls differ; seed 7 with n = 4 gives four texts, twice the same."""
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    assert len({only(llm.generate("a", params)) for _ in range(5)}) > 1
    seeded = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=7, n=4)
    first, second = (
        [output.token_ids for output in llm.generate("a", seeded)[0].outputs] for _ in range(2)
    )
    assert first == second
    assert len(set(map(tuple, first))) == 4
    alone = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=7)
    assert llm.generate("a", alone)[0].outputs[0].token_ids == first[0]


def test_two_engines_share_nothing_and_options_stay(tmp_path: Path) -> None:
    """K07: two models of 2 and 3 layers, one options dictionary."""
    options: dict[str, Any] = {"max_num_seqs": 2, "kv_cache_dtype": "int8", "threads": 1}
    before = dict(options)
    paths = [write_tiny(tmp_path / str(n), num_hidden_layers=n, seed=n) for n in (2, 3)]
    solo = []
    for path in paths:
        with LLM(path, **options) as llm:
            solo.append(only(llm.generate("abc", GREEDY)))
    with LLM(paths[0], **options) as two, LLM(paths[1], **options) as three:
        assert options == before
        assert (two.model_config.num_layers, three.model_config.num_layers) == (2, 3)
        for _ in range(2):
            assert only(two.generate("abc", GREEDY)) == solo[0]
            assert only(three.generate("abc", GREEDY)) == solo[1]
        assert two.memory().kv_bytes_per_token * 3 == three.memory().kv_bytes_per_token * 2


def test_non_finite_numbers_are_an_error_that_names_the_layer(tmp_path: Path) -> None:
    """G06: fp16 overflow ends the request with a reason; bf16 answers."""

    model = write_tiny(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if "gate_proj" in name or "up_proj" in name:
            tensor.mul_(50)
        if "down_proj" in name:
            tensor.fill_(6e4)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with LLM(model, dtype="float16", threads=1) as llm:
        (output,) = llm.generate("abc", GREEDY)
        assert output.outputs[0].finish_reason == "error"
        assert output.outputs[0].token_ids == []
        assert "model.layers.0" in (output.outputs[0].error or "")
        with pytest.raises(NonFiniteError, match=r"sequence 0: model.layers.0 gave NaN"):
            llm.score([[1, 2, 3], [4, 5]])
        llm.core.check_integrity()
        assert not llm.core.has_unfinished
    with LLM(model, dtype="bfloat16", threads=1) as llm:
        assert only(llm.generate("abc", GREEDY))[1] == "length"


def test_a_callback_that_fails_leaves_a_working_engine(llm: LLM) -> None:
    def fail(index: int, position: int, rows: torch.Tensor) -> None:
        raise ValueError("disk full")

    with pytest.raises(ValueError, match="disk full"):
        llm.score([[1, 2, 3], [4, 5, 6]], fail)
    assert llm.score([[1, 2, 3]]) == llm.score([[1, 2, 3]])


def test_chat_renders_the_template_without_extra_specials(tmp_path: Path) -> None:
    """S12: exactly one BOS, whether the tokenizer or the template writes it."""
    model = write_tiny(tmp_path / "model")
    write_tokenizer(model, add_bos=True, chat_template="<|bos|>{{ messages[0]['content'] }}")
    with LLM(model, threads=1) as llm:
        (chat,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
        (text,) = llm.generate("hi", GREEDY)
        assert chat.prompt_token_ids == text.prompt_token_ids == [BOS, *b"hi"]
        assert chat.outputs == text.outputs
        two = llm.chat([[{"role": "user", "content": t}] for t in ("hi", "ho")], GREEDY)
        assert [o.prompt_token_ids[1:] for o in two] == [[*b"hi"], [*b"ho"]]


@pytest.mark.parametrize("prompts", [[5], [{"text": "a"}], [None], [ids([288])]])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError) as error:
        llm.generate(prompts, GREEDY)
    assert error.value.field == "prompt"


def test_memory_report(tiny_llama: Path) -> None:
    """K10, M01: allocated, used and peak apart; scales counted."""
    with LLM(tiny_llama, threads=1, max_num_seqs=3, kv_cache_dtype="int8") as llm:
        report = llm.memory()
        assert report.kv_bytes_per_token == 2 * 2 * 2 * (16 + 2)
        assert report.kv_capacity_tokens == 3 * 128
        assert report.kv_allocated_bytes == 3 * 128 * report.kv_bytes_per_token
        assert (report.kv_used_bytes, report.kv_peak_bytes) == (0, 0)
        assert report.weights_bytes == report.checkpoint_bytes
        assert report.peak_rss_bytes > report.weights_bytes
        llm.generate(ids([5] * 40), GREEDY)
        assert llm.memory().kv_peak_bytes == 4 * 16 * report.kv_bytes_per_token
        assert llm.memory().kv_used_bytes == 0
        pool = sum(t.nbytes for t in llm._open.pool.snapshot(range(24)))
        assert pool == report.kv_allocated_bytes


def test_memory_limit_sizes_the_pool_or_says_what_helps(tiny_llama: Path) -> None:
    """L05."""
    with LLM(tiny_llama, threads=1, max_num_batched_tokens=16) as llm:
        report = llm.memory()
    base = report.weights_bytes + report.activation_bytes
    options: dict[str, Any] = {"threads": 1, "max_num_batched_tokens": 16}
    with LLM(tiny_llama, **options, memory=base + 5 * 16 * 512) as llm:
        assert llm.memory().kv_capacity_tokens == 80
        assert llm.config.max_model_len == 80
        with pytest.raises(ContextLengthError, match="the context holds 80"):
            llm.generate(ids([1] * 80), GREEDY)
    with pytest.raises(CapacityError, match="raise memory"):
        LLM(tiny_llama, **options, memory=base + 5 * 16 * 512, max_model_len=128)
    with pytest.raises(CapacityError, match="raise memory"):
        LLM(tiny_llama, **options, memory="400KiB")


def test_kernels_are_listed_with_refusals(llm: LLM) -> None:
    rows = llm.kernels()
    assert rows[0].layer.startswith("model.layers.0.")
    assert {row.kernel for row in rows}
    assert rows[-1].layer == "attention"


def test_unknown_options_and_models_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown option max_seqs"):
        LLM(tiny_llama, max_seqs=3)
    with pytest.raises(CheckpointError):
        LLM(tmp_path / "nowhere")


def test_a_closed_engine_says_so(tiny_llama: Path) -> None:
    llm = LLM(tiny_llama, threads=1)
    llm.close()
    llm.close()
    with pytest.raises(QinferError, match="closed"):
        llm.generate("abc")
    assert llm.config.max_model_len == 128


def test_loading_reports_progress(tiny_llama: Path) -> None:
    seen: list[tuple[int, int]] = []
    LLM(tiny_llama, threads=1, on_load=lambda *at: seen.append(at)).close()
    assert seen == [(1, 2), (2, 2)]


@pytest.mark.parametrize("prompts", [5, None, {"prompt_token_ids": 5}, [5]])
def test_what_is_no_list_of_prompts_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match=r"prompts? must be text") as error:
        llm.generate(prompts)
    assert error.value.field == "prompt"
