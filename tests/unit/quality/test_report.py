"""From scores to figures, and the refusal to compare unlike methods."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from support.records import METHOD

from qinfer.errors import MethodMismatchError
from qinfer.quality.perplexity import Window, cut_windows
from qinfer.quality.report import (
    checkpoint_sha256,
    divergence,
    quality,
    require_same_method,
    tokens_sha256,
)
from qinfer.quality.scoring import Scores


def test_b04_equal_methods_compare() -> None:
    """B04: what only names a thing may differ as long as its hash is equal."""
    require_same_method(METHOD, METHOD)
    require_same_method(METHOD, dataclasses.replace(METHOD, text="copy.txt", baseline="elsewhere"))


@pytest.mark.parametrize(
    "change",
    [
        {"window": 1024},
        {"stride": 256},
        {"bos": True},
        {"text_sha256": "ff"},
        {"tokens_sha256": "ff"},
        {"dtype": "float32"},
        {"num_windows": 9},
        {"tokens_scored": 1},
        {"baseline_sha256": "ff"},
        {"baseline_kv_cache_dtype": "int8"},
        {"join": "lines"},
    ],
)
def test_b04_unlike_methods_are_refused_by_field(change: dict[str, object]) -> None:
    """B04: a drift between runs whose settings differ is never shown."""
    other = dataclasses.replace(METHOD, **change)  # type: ignore[arg-type]
    with pytest.raises(MethodMismatchError) as caught:
        require_same_method(METHOD, other)
    for name, value in change.items():
        assert name in str(caught.value)
        assert str(value) in str(caught.value)


def test_b04_all_differences_are_listed() -> None:
    """B04: one message tells everything that must change."""
    with pytest.raises(MethodMismatchError, match=r"window.*stride"):
        require_same_method(METHOD, dataclasses.replace(METHOD, window=64, stride=64))


def test_token_hash_sees_cuts_and_ids() -> None:
    hashes = {
        tokens_sha256(cut_windows(range(20), window=4, stride=4)),
        tokens_sha256(cut_windows(range(20), window=4, stride=2)),
        tokens_sha256(cut_windows(range(20), window=5, stride=5)),
        tokens_sha256(cut_windows(range(1, 21), window=4, stride=4)),
    }
    assert len(hashes) == 4


def test_checkpoint_hash_sees_content_not_place(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"12345")
    assert checkpoint_sha256(tmp_path / "a") == checkpoint_sha256(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").write_bytes(b"12346")
    assert checkpoint_sha256(tmp_path / "a") != checkpoint_sha256(tmp_path / "b")


def _scores(shift: float, kl: float) -> tuple[list[Window], Scores, Scores]:
    windows = cut_windows(range(140), window=70, stride=70)
    base = Scores([[-1.0] * w.num_scored for w in windows])
    mine = Scores(
        [[-1.0 - shift] * w.num_scored for w in windows],
        [np.full(w.num_scored, kl) for w in windows],
        [np.ones(w.num_scored, dtype=bool) for w in windows],
    )
    return windows, mine, base


def test_k18_drift_is_reported_per_context_length() -> None:
    """K18: errors grow with the context, so each range of it has its own figures."""
    windows, mine, base = _scores(0.1, 0.01)
    assert mine.kl is not None
    for kl in mine.kl:
        kl[31:] = 0.05  # tokens with a context of 32 and more
    figures = divergence(windows, mine, base)
    assert [(c.context_from, c.context_to) for c in figures.by_context] == [(1, 31), (32, 127)]
    assert [c.tokens for c in figures.by_context] == [62, 76]
    assert [c.kld_mean for c in figures.by_context] == pytest.approx([0.01, 0.05])
    assert figures.by_context[0].drift_percent == pytest.approx(10.517, abs=1e-3)


def test_the_baselines_own_divergence_is_zero() -> None:
    windows, _, base = _scores(0.0, 0.0)
    figures = divergence(windows, base, base)
    assert figures.mean == figures.max == 0.0
    assert figures.top1_agreement == 1.0
    assert sum(c.tokens for c in figures.by_context) == 138


def test_quality_uses_the_methods_bytes_and_words() -> None:
    _, mine, base = _scores(0.1, 0.01)
    method = dataclasses.replace(METHOD, tokens_scored=138, bytes_scored=276, words_scored=69)
    figures = quality(method, mine, base)
    assert figures.drift_percent == pytest.approx(10.517, abs=1e-3)
    assert figures.bits_per_byte == pytest.approx(1.1 / np.log(2) / 2)
    assert figures.word_perplexity == pytest.approx(np.exp(2.2))
    assert figures.drift_interval == pytest.approx((10.517, 10.517), abs=1e-3)
