"""Scoring windows with a fake engine that hands its rows over in uneven chunks."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from qinfer.errors import CapacityError, MethodMismatchError
from qinfer.quality import scoring
from qinfer.quality.perplexity import Window, cut_windows, perplexity
from qinfer.quality.scoring import BaselineRows, OnLogprobs, score_baseline, score_model

VOCAB = 50


class FakeLLM:
    """A bigram table; `chunk` rows are handed over at a time, sequences interleaved."""

    def __init__(self, seed: int = 0, *, chunk: int = 3, noise: float = 0.0, vocab: int = VOCAB):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(vocab, vocab, generator=generator)
        logits += noise * torch.randn(vocab, vocab, generator=generator)
        self.table = torch.log_softmax(logits, dim=-1)
        self.chunk = chunk

    def score(
        self,
        token_ids: Sequence[Sequence[int]],
        on_logprobs: OnLogprobs | None = None,
        *,
        starts: Sequence[int] | None = None,
    ) -> list[list[float]]:
        starts = starts or [1] * len(token_ids)
        longest = max(len(ids) for ids in token_ids)
        for offset in range(0, longest - 1, self.chunk):
            for index, (ids, start) in enumerate(zip(token_ids, starts, strict=True)):
                position = start - 1 + offset
                rows = self.table[torch.tensor(ids[:-1])][position : position + self.chunk]
                if on_logprobs is not None and rows.shape[0]:
                    on_logprobs(index, position, rows)
        return [
            [float(self.table[a, b]) for a, b in itertools.pairwise(ids[start - 1 :])]
            for ids, start in zip(token_ids, starts, strict=True)
        ]


def _windows(stride: int = 8, length: int = 50) -> list[Window]:
    tokens = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(3))
    return cut_windows(tokens.tolist(), window=8, stride=stride)


@pytest.mark.parametrize("stride", [8, 5, 1])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_baseline_rows_are_those_of_the_scored_tokens(
    tmp_path: Path, stride: int, chunk: int
) -> None:
    windows = _windows(stride)
    llm = FakeLLM(chunk=chunk)
    rows = BaselineRows(tmp_path / "rows", windows, VOCAB)
    scores = score_baseline(llm, windows, rows)
    assert (
        rows.path.stat().st_size == rows.num_bytes == 4 * VOCAB * sum(w.num_scored for w in windows)
    )
    for index, window in enumerate(windows):
        context = torch.tensor(window.token_ids[window.first_scored - 1 : -1])
        assert torch.equal(rows.read(index, 0, window.num_scored), llm.table[context])
        expected = [float(llm.table[a, b]) for a, b in zip(context, window.scored_ids, strict=True)]
        assert scores.logprobs[index] == expected


@pytest.mark.parametrize("stride", [8, 5])
def test_b05_a_model_against_itself_through_the_file(tmp_path: Path, stride: int) -> None:
    """B05: exactly 0, 100 % agreement, whatever the chunks."""
    windows = _windows(stride)
    rows = BaselineRows(tmp_path / "rows", windows, VOCAB)
    base = score_baseline(FakeLLM(chunk=4), windows, rows)
    same = score_model(FakeLLM(chunk=3), windows, rows)
    assert same.kl is not None
    assert same.agrees is not None
    assert all((kl == 0).all() for kl in same.kl)
    assert all(agrees.all() for agrees in same.agrees)
    assert perplexity(same.logprobs) == perplexity(base.logprobs)


def test_divergence_is_that_of_the_full_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "CHUNK_ROWS", 2)
    windows = _windows()
    base, model = FakeLLM(), FakeLLM(noise=0.3)
    rows = BaselineRows(tmp_path / "rows", windows, VOCAB)
    score_baseline(base, windows, rows)
    scores = score_model(model, windows, rows)
    assert scores.kl is not None
    table = torch.nn.functional.kl_div(
        model.table.double(), base.table.double(), reduction="none", log_target=True
    ).sum(-1)
    for window, kl in zip(windows, scores.kl, strict=True):
        context = torch.tensor(window.token_ids[window.first_scored - 1 : -1])
        np.testing.assert_allclose(kl, table[context].numpy(), rtol=1e-5, atol=1e-7)
        assert (kl > 0).all()


def test_progress_counts_scored_tokens(tmp_path: Path) -> None:
    windows = _windows()
    seen: list[tuple[int, int]] = []
    rows = BaselineRows(tmp_path / "rows", windows, VOCAB)
    score_baseline(FakeLLM(), windows, rows, lambda done, total: seen.append((done, total)))
    total = sum(w.num_scored for w in windows)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    windows = _windows()
    rows = BaselineRows(tmp_path / "rows", windows, VOCAB)
    score_baseline(FakeLLM(), windows, rows)
    with pytest.raises(MethodMismatchError, match=r"60 tokens.*baseline 50"):
        score_model(FakeLLM(vocab=60), windows, rows)


def test_a_disk_too_small_is_found_before_scoring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "DISK_RESERVE", 1 << 60)
    windows = _windows()
    rows = BaselineRows(tmp_path / "rows", windows, VOCAB)
    with pytest.raises(CapacityError, match="--num-windows"):
        score_baseline(FakeLLM(), windows, rows)
    assert not rows.path.exists()


class ForgetfulLLM(FakeLLM):
    """Hands over only the rows of the first sequence."""

    def score(
        self,
        token_ids: Sequence[Sequence[int]],
        on_logprobs: OnLogprobs | None = None,
        *,
        starts: Sequence[int] | None = None,
    ) -> list[list[float]]:
        super().score(token_ids[:1], on_logprobs)
        return super().score(token_ids)


def test_missing_rows_are_never_taken_for_zero(tmp_path: Path) -> None:
    windows = _windows()
    with pytest.raises(RuntimeError, match="missing"):
        score_baseline(ForgetfulLLM(), windows, BaselineRows(tmp_path / "rows", windows, VOCAB))
