"""`evaluate` on tiny models through the real engine, with transformers as the oracle."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from support.checkpoints import write_tiny
from support.gguf_files import write_gguf

import qinfer
from qinfer.engine.llm import LLM
from qinfer.errors import CheckpointError, ConfigError, MethodMismatchError
from qinfer.quality.perplexity import cut_windows, perplexity
from qinfer.quant.pipeline import quantize
from qinfer.report.record import EvaluationRecord
from qinfer.workflows import evaluation
from qinfer.workflows.evaluation import EvaluationOptions, evaluate
from qinfer.workflows.row import SpeedOptions

TEXT = "It is a truth universally acknowledged, that a single man. " * 12
FAST: dict[str, Any] = {"window": 48, "num_windows": 4, "speed": None, "isolate": False}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def int8_model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "tiny-int8"
    quantize(tiny_llama, out, weights="int8", algorithm="rtn", group_size=32, kv_cache_dtype="int8")
    return out


def _oracle(path: Path, windows: list[tuple[int, ...]], first: list[int]) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    scores = []
    for ids, start in zip(windows, first, strict=True):
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)
        scores.append([float(rows[i - 1, ids[i]]) for i in range(start, len(ids))])
    return perplexity(scores)


@pytest.mark.parametrize("stride", [48, 20])
def test_perplexity_equals_transformers(tiny_llama: Path, text: Path, stride: int) -> None:
    record = evaluate([], baseline=tiny_llama, text=text, **(FAST | {"stride": stride}))
    windows = cut_windows(list(TEXT.encode()), window=48, stride=stride, num_windows=4)
    expected = _oracle(
        tiny_llama, [w.token_ids for w in windows], [w.first_scored for w in windows]
    )
    assert record.rows[0].quality.perplexity == pytest.approx(expected, rel=1e-5)
    assert record.method.tokens_scored == sum(w.num_scored for w in windows)


def test_b05_the_same_model_and_cache_twice_is_zero(
    tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    """B05: a copy of the baseline: KLD exactly 0, all tokens agree, no drift."""
    copy = tmp_path / "copy"
    copy.symlink_to(tiny_llama, target_is_directory=True)
    record = evaluate([copy], baseline=tiny_llama, text=text, **FAST)
    assert len(record.rows) == 2
    row = record.rows[1]
    assert (row.divergence.mean, row.divergence.max) == (0.0, 0.0)
    assert row.divergence.top1_agreement == 1.0
    assert row.quality.drift_percent == 0.0


def test_k18_quantized_caches_show_their_damage(tiny_llama: Path, text: Path) -> None:
    """K18: scoring reads through the quantized cache; one forward past it would show no drift."""
    record = evaluate(
        [tiny_llama], baseline=tiny_llama, text=text, kv_cache_dtypes=["int8", "fp8"], **FAST
    )
    assert [row.kv_cache_dtype for row in record.rows] == ["fp32", "int8", "fp8_e4m3"]
    _, int8, fp8 = record.rows
    assert 0 < int8.divergence.mean < fp8.divergence.mean
    assert 1 < fp8.memory.kv_bytes_per_token / int8.memory.kv_bytes_per_token + 1 <= 2
    assert [c.context_from for c in fp8.divergence.by_context] == [1, 32]


def test_k15_weights_and_cache_are_independent(
    tiny_llama: Path, int8_model: Path, text: Path
) -> None:
    """K15: one row per (checkpoint, KV type); what is the baseline already is not repeated."""
    record = evaluate(
        [tiny_llama, int8_model],
        baseline=tiny_llama,
        text=text,
        kv_cache_dtypes=["fp32", "int8"],
        **FAST,
    )
    rows = [(row.model, row.weights, row.kv_cache_dtype) for row in record.rows]
    name = tiny_llama.name
    assert rows == [
        (name, "fp32", "fp32"),
        (name, "fp32", "int8"),
        ("tiny-int8", "int8 g32 sym", "fp32"),
        ("tiny-int8", "int8 g32 sym", "int8"),
    ]
    weights = record.rows[2]
    assert weights.memory.checkpoint_bytes < record.rows[0].memory.checkpoint_bytes
    assert abs(weights.quality.drift_percent) < 5
    assert sum(weights.kernels.values()) > 2


def test_auto_takes_the_recorded_kv_type_once(
    tiny_llama: Path, int8_model: Path, text: Path
) -> None:
    record = evaluate(
        [int8_model], baseline=tiny_llama, text=text, kv_cache_dtypes=["int8", "auto"], **FAST
    )
    assert [row.kv_cache_dtype for row in record.rows] == ["fp32", "int8"]


def test_a_baseline_of_another_dtype_is_a_row_of_its_own(tiny_llama: Path, text: Path) -> None:
    record = evaluate(
        [tiny_llama],
        baseline=tiny_llama,
        text=text,
        dtype="bfloat16",
        baseline_dtype="float32",
        **FAST,
    )
    assert [row.dtype for row in record.rows] == ["float32", "bfloat16"]
    assert record.method.baseline_dtype == "float32"
    assert record.rows[1].divergence.mean > 0  # the noise floor of bf16


def test_b01_pad_ids_in_the_text_are_tokens_like_any_other(tmp_path: Path) -> None:
    """B01: documents with the pad id inside score the same alone, in twos and in eights."""
    path = write_tiny(tmp_path / "pad", pad_token_id=ord("a"))
    documents = [
        list(TEXT.encode()[start : start + size])
        for start, size in [(0, 3), (3, 40), (11, 90), (7, 3), (30, 40), (2, 90), (50, 3), (60, 40)]
    ]
    assert any(ord("a") in document for document in documents)
    with LLM(path, max_num_seqs=8, max_model_len=96) as llm:
        results = []
        for batch in (1, 2, 8):
            scores = []
            for start in range(0, len(documents), batch):
                scores += llm.score(documents[start : start + batch])
            results.append(perplexity(scores))
    expected = _oracle(path, [tuple(document) for document in documents], [1] * len(documents))
    assert results == pytest.approx([expected] * 3, rel=1e-5)


def test_timed_rows_have_figures_and_a_method(tiny_llama: Path, text: Path) -> None:
    record = evaluate(
        [],
        baseline=tiny_llama,
        text=text,
        **(FAST | {"speed": SpeedOptions(input_len=8, output_len=4, concurrency=(1, 2))}),
    )
    speeds = record.rows[0].speed
    assert [speed.concurrency for speed in speeds] == [1, 2]
    assert all(speed.ttft_seconds.p50 > 0 for speed in speeds)
    assert record.speed_method is not None
    assert record.speed_method["input_len"] == 8
    assert record.rows[0].memory.process_peak_bytes is None  # rows shared this process
    assert EvaluationRecord.from_dict(record.to_dict()) == record


def test_k10_a_row_of_its_own_process_has_its_own_peak(tiny_llama: Path, text: Path) -> None:
    """K10: allocated, used and peak bytes apart; the peak is not that of the caller."""
    ballast = bytearray(400 << 20)
    seen: list[tuple[str, int, int, str]] = []
    record = evaluate(
        [],
        baseline=tiny_llama,
        text=text,
        on_progress=lambda *step: seen.append(step),
        **(FAST | {"isolate": True, "threads": 1}),
    )
    memory = record.rows[0].memory
    assert memory.process_start_bytes is not None
    assert memory.process_peak_bytes is not None
    assert memory.process_start_bytes <= memory.process_peak_bytes
    assert memory.process_peak_bytes - memory.process_start_bytes < len(ballast)
    assert memory.kv_peak_bytes <= memory.kv_allocated_bytes
    assert record.environment.threads == 1
    assert seen[-1] == (f"{tiny_llama.name} (baseline)", 100, 100, "")
    plain = evaluate([], baseline=tiny_llama, text=text, **FAST)
    assert plain.rows[0].quality == record.rows[0].quality


def test_an_error_of_the_child_keeps_its_class(tiny_llama: Path, text: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len|context|position"):
        evaluate([], baseline=tiny_llama, text=text, **(FAST | {"window": 500, "isolate": True}))


def test_b04_a_run_of_another_method_is_refused(
    tiny_llama: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B04: two runs with another window are not compared."""
    first = evaluate([], baseline=tiny_llama, text=text, **FAST)
    evaluate([], baseline=tiny_llama, text=text, same_method_as=first.method, **FAST)

    def fail(*_: object, **__: object) -> None:
        pytest.fail("a row was measured before the methods were compared")

    monkeypatch.setattr(evaluation, "measure", fail)
    with pytest.raises(MethodMismatchError, match=r"window \(48 / 40\)"):
        evaluate(
            [],
            baseline=tiny_llama,
            text=text,
            same_method_as=first.method,
            **(FAST | {"window": 40}),
        )


def test_b04_models_that_tokenize_otherwise_are_refused(
    tiny_llama: Path, tmp_path: Path, text: Path
) -> None:
    """B04: per-token figures of different tokens mean nothing."""
    other = write_tiny(tmp_path / "other")
    tokenizer = (other / "tokenizer.json").read_text(encoding="utf-8")
    merged = tokenizer.replace('"normalizer": null', '"normalizer": {"type": "Lowercase"}')
    assert merged != tokenizer
    (other / "tokenizer.json").write_text(merged, encoding="utf-8")
    with pytest.raises(MethodMismatchError, match="tokenizes the text otherwise"):
        evaluate([other], baseline=tiny_llama, text=text, **FAST)


def test_a_gguf_file_runs_on_its_codes_beside_its_dense_baseline(
    tiny_llama: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QINFER_CACHE", str(tmp_path / "cache"))
    kind = GGMLQuantizationType.Q8_0
    file = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", quant=kind)
    record = evaluate([file], baseline=file, text=text, **FAST)
    base, codes = record.rows
    assert (base.weights, codes.weights) == ("bf16", "Q8_0 (int8 g32 sym)")
    assert codes.memory.weights_bytes < 0.7 * base.memory.weights_bytes
    assert 0 < codes.divergence.mean < 0.01
    dense = evaluate([file], baseline=file, text=text, gguf_weights="dense", **FAST)
    assert [row.weights for row in dense.rows] == ["bf16"]  # the baseline itself, not a second row


def test_models_of_one_name_are_told_apart(tiny_llama: Path, tmp_path: Path, text: Path) -> None:
    other = tmp_path / tiny_llama.name
    other.symlink_to(tiny_llama, target_is_directory=True)
    record = evaluate([other], baseline=tiny_llama, text=text, **FAST)
    assert [row.model for row in record.rows] == [str(tiny_llama), str(other)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtypes": ()}, "kv_cache_dtypes"),
        ({"kv_cache_dtypes": "int8"}, "kv_cache_dtypes"),
        ({"kv_cache_dtypes": ("int3",)}, "int3"),
        ({"window": 1}, "window"),
        ({"stride": 1000}, "stride"),
        ({"num_windows": 0}, "num_windows"),
        ({"dtype": "float8"}, "float8"),
        ({"baseline_dtype": "float8"}, "float8"),
        ({"threads": 0}, "threads"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EvaluationOptions(**options)


def test_texts_that_cannot_be_read_are_named(tiny_llama: Path, tmp_path: Path) -> None:
    bad = tmp_path / "latin1.txt"
    bad.write_bytes(b"caf\xe9 " * 50)
    for path in (bad, tmp_path / "none.txt"):
        with pytest.raises(ConfigError, match=path.name):
            evaluate([], baseline=tiny_llama, text=path, **FAST)


def test_a_missing_model_is_found_before_anything_is_measured(
    tiny_llama: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "_measure_here", pytest.fail)
    with pytest.raises(CheckpointError, match="no-such-model"):
        evaluate(["./no-such-model"], baseline=tiny_llama, text=text, **FAST)


def test_a_bos_token_is_added_where_asked(tiny_llama: Path, text: Path) -> None:
    record = evaluate([], baseline=tiny_llama, text=text, **(FAST | {"add_bos": True}))
    assert record.method.bos
    assert record.method.stride == 47
    assert record.method.tokens_scored == 4 * 47
    assert math.isfinite(record.rows[0].quality.perplexity)
    assert replace(record.method, bos=False) != record.method


def test_the_public_name_is_the_function_whatever_was_imported() -> None:
    assert qinfer.evaluate is evaluate
