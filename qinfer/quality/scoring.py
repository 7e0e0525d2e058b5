"""Scoring windows through the served path, and comparing with a baseline scored before.

The baseline's fp32 log-softmax rows are kept in a plain file, so that several models, each in a
process of its own, are compared with one scoring of the baseline. The file is read in pieces, not
mapped: mapped pages would count as the memory of the model under test.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qinfer.errors import CapacityError, MethodMismatchError
from qinfer.quality.divergence import agreement_rows, kl_rows
from qinfer.quality.perplexity import Window

CHUNK_ROWS = 64  # rows compared at once: 64 x 49152 in float64 are 25 MB
DISK_RESERVE = 1 << 30  # bytes of disk that must stay free beside the baseline's rows

OnLogprobs = Callable[[int, int, Tensor], None]
OnProgress = Callable[[int, int], None]


class Scorer(Protocol):
    """The part of `LLM` that scoring needs."""

    def score(
        self,
        token_ids: Sequence[Sequence[int]],
        on_logprobs: OnLogprobs | None = None,
        *,
        starts: Sequence[int] | None = None,
    ) -> list[list[float]]:
        """Return the log-probability of every token of each sequence from `starts` on.

        `on_logprobs(sequence, position, rows)` receives their fp32 log-softmax rows in chunks;
        row `i` predicts token `position + i + 1`.
        """


@dataclass(frozen=True, slots=True)
class Scores:
    """What scoring a model gave, one entry per window, one value per scored token.

    Args:
        logprobs: natural log-probability of each scored token.
        kl: KL(baseline ‖ model) in nats; None when this was the baseline.
        agrees: the most likely token is the baseline's; None when this was the baseline.
    """

    logprobs: list[list[float]]
    kl: list[NDArray[np.float64]] | None = None
    agrees: list[NDArray[np.bool_]] | None = None


class BaselineRows:
    """The baseline's log-softmax rows of all scored tokens, float32 in a file.

    The file is as large as tokens x vocabulary x 4 bytes (100 MB for 512 tokens of a vocabulary
    of 49152); whoever made the folder removes it.

    Args:
        path: the file; made by the first write.
        windows: what is scored.
        vocab_size: entries of a row.
    """

    def __init__(self, path: Path, windows: Sequence[Window], vocab_size: int) -> None:
        self.path = path
        self.vocab_size = vocab_size
        self._starts = [0, *accumulate(window.num_scored for window in windows)]

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return self._starts[-1] * self.vocab_size * 4

    def create(self) -> None:
        """Make the empty file.

        Raises:
            CapacityError: the disk is too full for it.
        """
        free = shutil.disk_usage(self.path.parent).free
        if self.num_bytes + DISK_RESERVE > free:
            raise CapacityError(
                f"the baseline's distributions need {self.num_bytes / 1e9:.1f} GB in "
                f"{self.path.parent}, where {free / 1e9:.1f} GB are free; lower --num-windows, or "
                "let TMPDIR name a folder on a larger disk"
            )
        self.path.touch()

    def write(self, window: int, row: int, values: Tensor) -> None:
        """Store rows of a window from its scored token `row` on; `values` [rows, vocab] fp32."""
        self._check_width(values)
        with self.path.open("r+b") as file:
            file.seek(self._offset(window, row))
            values.cpu().contiguous().numpy().tofile(file)

    def read(self, window: int, row: int, count: int) -> Tensor:
        """Return `count` rows of a window from its scored token `row` on; [count, vocab] fp32."""
        values = np.fromfile(
            self.path,
            dtype=np.float32,
            count=count * self.vocab_size,
            offset=self._offset(window, row),
        )
        return torch.from_numpy(values).view(count, self.vocab_size)

    def compare(self, window: int, row: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's KL divergence (float64) and agreement (bool); [rows], on the CPU."""
        self._check_width(values)
        kl, agrees = [], []
        for start in range(0, values.shape[0], CHUNK_ROWS):
            mine = values[start : start + CHUNK_ROWS]
            theirs = self.read(window, row + start, mine.shape[0]).to(mine.device)
            kl.append(kl_rows(theirs, mine).cpu())
            agrees.append(agreement_rows(theirs, mine).cpu())
        return torch.cat(kl), torch.cat(agrees)

    def _check_width(self, values: Tensor) -> None:
        if values.shape[1] != self.vocab_size:
            raise MethodMismatchError(
                f"the model predicts {values.shape[1]} tokens, the baseline {self.vocab_size}; "
                "models with different vocabularies cannot be compared"
            )

    def _offset(self, window: int, row: int) -> int:
        return (self._starts[window] + row) * self.vocab_size * 4


def score_baseline(
    scorer: Scorer,
    windows: Sequence[Window],
    rows: BaselineRows,
    on_progress: OnProgress | None = None,
) -> Scores:
    """Score the baseline and store its distributions in `rows`."""
    rows.create()
    covered = _Coverage(windows, on_progress)

    def store(sequence: int, position: int, values: Tensor) -> None:
        rows.write(sequence, position + 1 - windows[sequence].first_scored, values)
        covered.add(sequence, values.shape[0])

    return Scores(_score(scorer, windows, store, covered))


def score_model(
    scorer: Scorer,
    windows: Sequence[Window],
    rows: BaselineRows,
    on_progress: OnProgress | None = None,
) -> Scores:
    """Score a model on the same windows and compare it with the baseline, row by row.

    Raises:
        MethodMismatchError: the vocabularies differ.
    """
    covered = _Coverage(windows, on_progress)
    kl = [np.full(window.num_scored, np.nan) for window in windows]
    agrees = [np.zeros(window.num_scored, dtype=np.bool_) for window in windows]

    def compare(sequence: int, position: int, values: Tensor) -> None:
        row = position + 1 - windows[sequence].first_scored
        divergence, same = rows.compare(sequence, row, values)
        kl[sequence][row : row + values.shape[0]] = divergence.numpy()
        agrees[sequence][row : row + values.shape[0]] = same.numpy()
        covered.add(sequence, values.shape[0])

    return Scores(_score(scorer, windows, compare, covered), kl, agrees)


class _Coverage:
    """Counts the scored tokens that arrived, reports progress and finds gaps."""

    def __init__(self, windows: Sequence[Window], on_progress: OnProgress | None) -> None:
        self._missing = [window.num_scored for window in windows]
        self._total = sum(self._missing)
        self._on_progress = on_progress

    def add(self, sequence: int, count: int) -> None:
        self._missing[sequence] -= count
        if self._on_progress is not None:
            self._on_progress(self._total - sum(self._missing), self._total)

    def check(self) -> None:
        if any(self._missing):
            raise RuntimeError(f"rows missing (or surplus, if negative): {self._missing}")


def _score(
    scorer: Scorer, windows: Sequence[Window], on_logprobs: OnLogprobs, covered: _Coverage
) -> list[list[float]]:
    logprobs = scorer.score(
        [window.token_ids for window in windows],
        on_logprobs,
        starts=[window.first_scored for window in windows],
    )
    covered.check()
    return logprobs
