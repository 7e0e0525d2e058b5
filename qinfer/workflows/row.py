"""Measuring one row of an evaluation, one (checkpoint, KV type), in this process.

Job and result are plain data, so that `isolation` can hand them to a process of the row's own.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qinfer.bench.offline import offline_method, run_offline
from qinfer.engine.llm import LLM
from qinfer.host import peak_rss
from qinfer.quality.perplexity import Window
from qinfer.quality.scoring import BaselineRows, Scores, score_baseline, score_model
from qinfer.report.jsonio import build
from qinfer.report.record import MemoryFigures, SpeedFigures

OnPercent = Callable[[int, str], None]

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Shares of the progress bar: loading, timing, scoring; timing gives its share if not wanted.
_LOADED, _TIMED = 10, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedOptions:
    """What the timed requests look like; see `bench.offline.run_offline`."""

    input_len: int = 128
    output_len: int = 32
    concurrency: tuple[int, ...] = (1, 4)
    num_requests: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowJob:
    """What to measure.

    Args:
        model: directory of the checkpoint.
        engine: fields of `EngineConfig`.
        token_ids: the windows' tokens.
        first_scored: the windows' first scored tokens.
        rows_path: file of the baseline's distributions.
        vocab_size: width of them; None = this row is the baseline, and writes the file.
        speed: what to time; None = nothing.
    """

    model: str
    engine: dict[str, Any]
    token_ids: tuple[tuple[int, ...], ...]
    first_scored: tuple[int, ...]
    rows_path: str
    vocab_size: int | None
    speed: SpeedOptions | None

    def windows(self) -> list[Window]:
        """Return the windows to score."""
        return [
            Window(ids, first) for ids, first in zip(self.token_ids, self.first_scored, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What was measured; `kl` and `agrees` are None for the baseline."""

    weights: str
    dtype: str
    kv_cache_dtype: str
    vocab_size: int
    device: str
    threads: int
    memory: MemoryFigures
    speed: tuple[SpeedFigures, ...]
    speed_method: dict[str, Any] | None
    kernels: dict[str, int]
    logprobs: tuple[tuple[float, ...], ...]
    kl: tuple[tuple[float, ...], ...] | None
    agrees: tuple[tuple[bool, ...], ...] | None
    seconds: float = field(default=0.0)

    def scores(self) -> Scores:
        """Return the scores as arrays."""
        logprobs = [list(values) for values in self.logprobs]
        if self.kl is None or self.agrees is None:
            return Scores(logprobs)
        kl = [np.array(values, dtype=np.float64) for values in self.kl]
        agrees = [np.array(values, dtype=np.bool_) for values in self.agrees]
        return Scores(logprobs, kl, agrees)


def measure(job: RowJob, on_percent: OnPercent, *, own_process: bool) -> RowResult:
    """Load a model, time it, score it.

    Memory is read between timing and scoring: the comparison of distributions needs memory that
    serving does not.

    Args:
        job: what to measure.
        on_percent: called with percent done and what is going on.
        own_process: nothing else ran in this process, so its peak memory is this row's.

    Raises:
        QinferError: the model cannot be loaded, or is not comparable with the baseline.
    """
    started = time.monotonic()
    on_percent(0, "loading")
    start_bytes = peak_rss()
    with LLM(Path(job.model), **job.engine) as llm:
        on_percent(_LOADED, "timing")
        speed, method = _time(llm, job.speed, on_percent)
        memory = _memory(llm, start_bytes if own_process else None)
        on_percent(_TIMED, "scoring")
        scores = _score(llm, job, on_percent)
        on_percent(100, "")
        return RowResult(
            weights=_weights_label(llm),
            dtype=llm.config.dtype,
            kv_cache_dtype=llm.config.kv_cache_dtype,
            vocab_size=llm.model_config.vocab_size,
            device=llm.config.device,
            threads=llm.config.threads or 1,
            memory=memory,
            speed=speed,
            speed_method=method,
            kernels=dict(Counter(row.kernel for row in llm.kernels())),
            logprobs=tuple(map(tuple, scores.logprobs)),
            kl=None if scores.kl is None else tuple(tuple(a.tolist()) for a in scores.kl),
            agrees=(
                None if scores.agrees is None else tuple(tuple(a.tolist()) for a in scores.agrees)
            ),
            seconds=time.monotonic() - started,
        )


def _time(
    llm: LLM, options: SpeedOptions | None, on_percent: OnPercent
) -> tuple[tuple[SpeedFigures, ...], dict[str, Any] | None]:
    if options is None:
        return (), None
    rows = run_offline(
        llm,
        input_len=options.input_len,
        output_len=options.output_len,
        concurrency=options.concurrency,
        num_requests=options.num_requests,
        seed=options.seed,
        on_progress=lambda done, total: on_percent(
            _LOADED + (_TIMED - _LOADED) * done // total, "timing"
        ),
    )
    method = offline_method(
        llm,
        input_len=options.input_len,
        output_len=options.output_len,
        num_requests=options.num_requests,
        seed=options.seed,
    )
    figures = [build(SpeedFigures, row.to_dict(), where="speed") for row in rows]
    return tuple(figures), method


def _score(llm: LLM, job: RowJob, on_percent: OnPercent) -> Scores:
    windows = job.windows()

    def report(done: int, total: int) -> None:
        on_percent(_TIMED + (100 - _TIMED) * done // total, "scoring")

    vocab_size = llm.model_config.vocab_size if job.vocab_size is None else job.vocab_size
    rows = BaselineRows(Path(job.rows_path), windows, vocab_size)
    if job.vocab_size is None:
        return score_baseline(llm, windows, rows, report)
    return score_model(llm, windows, rows, report)


def _memory(llm: LLM, start_bytes: int | None) -> MemoryFigures:
    report = llm.memory()
    return MemoryFigures(
        weights_bytes=report.weights_bytes,
        checkpoint_bytes=report.checkpoint_bytes,
        kv_bytes_per_token=report.kv_bytes_per_token,
        kv_allocated_bytes=report.kv_allocated_bytes,
        kv_peak_bytes=report.kv_peak_bytes,
        process_start_bytes=start_bytes,
        process_peak_bytes=None if start_bytes is None else report.peak_rss_bytes,
    )


def _weights_label(llm: LLM) -> str:
    settings = llm.checkpoint.quantization
    if settings is None or not settings.formats:
        return _SHORT[llm.config.dtype]
    usual = str(settings.formats[0])
    return f"{usual} mixed" if len(settings.formats) > 1 else usual
