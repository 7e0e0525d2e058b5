"""`evaluate`: quality, memory and speed of several models and KV types against one baseline.

The baseline is scored once; every row runs in a process of its own (see `isolation`), through the
path that serves.
"""

import functools
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qinfer.checkpoint.hub import resolve_model
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.data.files import evaluation_text
from qinfer.engine.config import EngineConfig
from qinfer.errors import ConfigError, MethodMismatchError
from qinfer.models.tokenizer import Tokenizer, load_tokenizer
from qinfer.quality.divergence import DIRECTION
from qinfer.quality.perplexity import Window, cut_windows
from qinfer.quality.report import (
    JOIN,
    checkpoint_sha256,
    divergence,
    quality,
    require_same_method,
    tokens_sha256,
)
from qinfer.quality.scoring import Scores
from qinfer.report.environment import describe
from qinfer.report.record import EvaluationRecord, EvaluationRow, Method
from qinfer.schemes import parse_kv_dtype
from qinfer.workflows.isolation import RowRunner
from qinfer.workflows.progress import OnProgress, ignore
from qinfer.workflows.row import OnPercent, RowJob, RowResult, SpeedOptions, measure

DEFAULT_TEXT = "qinfer/data/evaluation.txt"
Run = Callable[[RowJob, OnPercent], RowResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """How to evaluate.

    Args:
        kv_cache_dtypes: KV types that every model is measured with.
        baseline_kv_cache_dtype: KV type of the baseline.
        text: a UTF-8 file; None = the text in the package.
        window: tokens that a model sees at once.
        stride: tokens from one window's start to the next; None = the text tokens of a window.
        num_windows: windows to score; None = the whole text.
        add_bos: put the tokenizer's BOS token in front of every window.
        dtype: type of activations and unquantized weights; `auto` = each checkpoint's.
        baseline_dtype: the same for the baseline; None = as `dtype`.
        device: where the models run.
        threads: CPU threads; None = the cores available.
        memory: total bytes for each model; None = what the device has free.
        activations: inputs of quantized linears: `int8` or `exact`; see `EngineConfig`.
        lm_head: `auto`, `int8` or `model`; see `EngineConfig`.
        gguf_weights: how the models that are `.gguf` files run: `codes` or `dense`; see
            `EngineConfig`. A baseline always runs dense.
        revision: branch, tag or commit of hub models.
        speed: what to time; None = quality and sizes only.
        time_baseline: time the baseline too.
        labels: names for the reports: the baseline's, then those of the models; None = the last
            part of each, or all of it where that would be ambiguous.
        isolate: one process per row. Without it rows are faster to start, but share a process, so
            their peak memory is not reported.
        same_method_as: refuse to go on if the method differs from this one.
    """

    kv_cache_dtypes: Sequence[str] = ("auto",)
    baseline_kv_cache_dtype: str = "auto"
    text: Path | None = None
    window: int = 512
    stride: int | None = None
    num_windows: int | None = 16
    add_bos: bool = False
    dtype: str = "auto"
    baseline_dtype: str | None = None
    device: str = "auto"
    threads: int | None = None
    memory: int | str | None = None
    activations: str = "int8"
    lm_head: str = "auto"
    gguf_weights: str = "codes"
    revision: str | None = None
    speed: SpeedOptions | None = field(default_factory=SpeedOptions)
    time_baseline: bool = True
    labels: Sequence[str] | None = None
    isolate: bool = True
    same_method_as: Method | None = None

    def __post_init__(self) -> None:
        """Refuse what can never work, before a model is looked for.

        Raises:
            ConfigError: naming the option.
        """
        if not self.kv_cache_dtypes or isinstance(self.kv_cache_dtypes, str):
            raise ConfigError("kv_cache_dtypes must be a list of at least one type")
        for name in (*self.kv_cache_dtypes, self.baseline_kv_cache_dtype):
            if name != "auto":
                parse_kv_dtype(name)
        cut_windows(
            range(3),
            window=self.window,
            stride=self.stride_tokens,
            num_windows=self.num_windows,
            bos_token_id=0 if self.add_bos else None,
        )
        EngineConfig(**self.engine_fields(self.dtype, "auto"))
        EngineConfig(**self.engine_fields(self.baseline_dtype or self.dtype, "auto"))

    @property
    def stride_tokens(self) -> int:
        """The stride, with its default filled in."""
        return self.window - self.add_bos if self.stride is None else self.stride

    def engine_fields(self, dtype: str, kv_cache_dtype: str) -> dict[str, Any]:
        """Return the settings of a row's engine: a cache just large enough for the work."""
        speed = self.speed
        longest = self.window if speed is None else speed.input_len + speed.output_len
        return {
            "device": self.device,
            "dtype": dtype,
            "kv_cache_dtype": kv_cache_dtype,
            "max_model_len": max(self.window, longest),
            "max_num_seqs": 1 if speed is None else max(speed.concurrency),
            "threads": self.threads,
            "memory": self.memory,
            "activations": self.activations,
            "lm_head": self.lm_head,
            "gguf_weights": self.gguf_weights,
        }


def evaluate(
    models: Sequence[str | Path],
    *,
    baseline: str | Path,
    on_progress: OnProgress | None = None,
    **options: Any,
) -> EvaluationRecord:
    """Measure drift, memory and speed of models against a baseline, one row per KV type.

    The baseline's row comes first. A model and KV type that is the baseline itself, or a row that
    was there already, is not measured twice.

    Args:
        models: directories, hub ids or `.gguf` files.
        baseline: what drift and divergence refer to; usually the unquantized model.
        on_progress: called with (row, percent, 100, what is going on).
        options: fields of `EvaluationOptions`.

    Raises:
        ConfigError: an option that cannot work, or a text that cannot be read.
        CheckpointError: a model that cannot be found or read.
        MethodMismatchError: a model tokenizes the text otherwise than the baseline, or predicts
            another vocabulary, or the method is not `same_method_as`.
        CapacityError: the baseline's distributions do not fit on the disk.
    """
    chosen = EvaluationOptions(**options)
    if isinstance(models, str | Path):
        raise ConfigError("models must be a list of models")
    weights = chosen.gguf_weights
    paths = [resolve_model(m, revision=chosen.revision, gguf_weights=weights) for m in models]
    base_path = resolve_model(baseline, revision=chosen.revision)
    labels = _labels([str(baseline), *map(str, models)], [base_path, *paths], chosen.labels)
    plan = _Plan(chosen, base_path, _read_text(chosen.text))
    for path, label in zip(paths, labels[1:], strict=True):
        plan.require_same_tokens(path, label)
    with tempfile.TemporaryDirectory(prefix="qinfer-eval-") as folder:
        run = RowRunner(Path(folder)).run if chosen.isolate else _measure_here
        session = _Session(plan, labels[0], run, Path(folder), on_progress or ignore)
        session.measure_baseline()
        for path, label in zip(paths, labels[1:], strict=True):
            for kv in chosen.kv_cache_dtypes:
                session.measure(path, label, kv)
        return session.record()


class _Plan:
    """Text, windows and the part of the method that is known before a model is loaded."""

    def __init__(self, options: EvaluationOptions, baseline: Path, text: tuple[str, bytes]) -> None:
        self.options = options
        self.baseline = baseline
        self.text_name, self.text_bytes = text
        tokenizer = load_tokenizer(baseline)
        bos = tokenizer.bos_token_id if options.add_bos else None
        if options.add_bos and bos is None:
            raise ConfigError("the baseline's tokenizer has no BOS token; leave add_bos out")
        self.stride = options.window - options.add_bos if options.stride is None else options.stride
        self._token_ids = self._encode(tokenizer)
        self.windows = cut_windows(
            self._token_ids,
            window=options.window,
            stride=options.stride_tokens,
            num_windows=options.num_windows,
            bos_token_id=bos,
        )
        pieces = [b"".join(map(tokenizer.token_bytes, w.scored_ids)) for w in self.windows]
        self.num_bytes = sum(map(len, pieces))
        self.num_words = sum(len(piece.split()) for piece in pieces)

    def require_same_tokens(self, path: Path, label: str) -> None:
        """Refuse a model whose tokenizer cuts the text otherwise: its scores mean other tokens."""
        if path != self.baseline and self._encode(load_tokenizer(path)) != self._token_ids:
            raise MethodMismatchError(
                f"{label} tokenizes the text otherwise than the baseline; per-token figures of "
                "different tokens cannot be compared"
            )

    @functools.cached_property
    def _baseline_sha256(self) -> str:
        return checkpoint_sha256(self.baseline)

    def method(self, label: str, *, dtype: str, kv_cache_dtype: str) -> Method:
        """Return the method of a baseline that ran with these types."""
        options = self.options
        return Method(
            text=self.text_name,
            text_sha256=hashlib.sha256(self.text_bytes).hexdigest(),
            tokens_sha256=tokens_sha256(self.windows),
            join=JOIN,
            window=options.window,
            stride=options.stride_tokens,
            bos=options.add_bos,
            num_windows=len(self.windows),
            tokens_scored=sum(window.num_scored for window in self.windows),
            bytes_scored=self.num_bytes,
            words_scored=self.num_words,
            dtype=options.dtype,
            baseline=label,
            baseline_sha256=self._baseline_sha256,
            baseline_dtype=dtype,
            baseline_kv_cache_dtype=kv_cache_dtype,
            divergence=f"{DIRECTION}, nats per token",
        )

    def job(self, path: Path, engine: dict[str, Any], rows: Path, vocab: int | None) -> RowJob:
        """Return the job of a row; without the vocabulary's size it is the baseline's."""
        timed = vocab is not None or self.options.time_baseline
        return RowJob(
            model=str(path),
            engine=engine,
            token_ids=tuple(window.token_ids for window in self.windows),
            first_scored=tuple(window.first_scored for window in self.windows),
            rows_path=str(rows),
            vocab_size=vocab,
            speed=self.options.speed if timed else None,
        )

    def _encode(self, tokenizer: Tokenizer) -> list[int]:
        return tokenizer.encode(self.text_bytes.decode("utf-8"), add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class _Measured:
    """A finished row, before it is compared with the baseline."""

    path: Path
    label: str
    result: RowResult


class _Session:
    """Measures row after row and turns them into a record."""

    def __init__(
        self, plan: _Plan, label: str, run: Run, folder: Path, on_progress: OnProgress
    ) -> None:
        self._plan = plan
        self._label = label
        self._run = run
        self._rows_path = folder / "baseline.f32"
        self._on_progress = on_progress
        self._rows: list[_Measured] = []
        self._method: Method | None = None

    def measure_baseline(self) -> None:
        options = self._plan.options
        earlier = options.same_method_as
        if earlier is not None:  # all but the types, which the baseline's engine decides
            known = self._plan.method(
                self._label,
                dtype=earlier.baseline_dtype,
                kv_cache_dtype=earlier.baseline_kv_cache_dtype,
            )
            require_same_method(earlier, known)
        dtype = options.baseline_dtype or options.dtype
        engine = options.engine_fields(dtype, options.baseline_kv_cache_dtype)
        result = self._measure(self._plan.baseline, f"{self._label} (baseline)", engine, None)
        self._rows.append(_Measured(self._plan.baseline, self._label, result))
        self._method = self._plan.method(
            self._label, dtype=result.dtype, kv_cache_dtype=result.kv_cache_dtype
        )
        if earlier is not None:
            require_same_method(earlier, self._method)

    def measure(self, path: Path, label: str, kv_cache_dtype: str) -> None:
        options = self._plan.options
        if self._known(path, kv_cache_dtype):
            return
        engine = options.engine_fields(options.dtype, kv_cache_dtype)
        stage = f"{label}, {kv_cache_dtype} KV"
        result = self._measure(path, stage, engine, self._rows[0].result.vocab_size)
        self._rows.append(_Measured(path, label, result))

    def record(self) -> EvaluationRecord:
        base = self._rows[0].result
        if self._method is None:
            raise RuntimeError("the baseline was not measured")
        methods = [item.result.speed_method for item in self._rows]
        return EvaluationRecord(
            method=self._method,
            speed_method=next(filter(None, methods), None),
            environment=describe(device=base.device, threads=base.threads),
            rows=tuple(
                _row(self._method, self._plan.windows, item, base.scores(), first=index == 0)
                for index, item in enumerate(self._rows)
            ),
        )

    def _known(self, path: Path, kv_cache_dtype: str) -> bool:
        """Tell whether an equal row was measured: same weights, same types after resolution."""
        same = [item.result for item in self._rows if item.path == path]
        if self._plan.options.baseline_dtype not in {None, self._plan.options.dtype}:
            same = [item for item in same if item is not self._rows[0].result]
        if kv_cache_dtype == "auto":
            recorded = open_checkpoint(path).kv_scheme
            if recorded is not None:
                return any(item.kv_cache_dtype == recorded.dtype for item in same)
            return any(parse_kv_dtype(item.dtype).dtype == item.kv_cache_dtype for item in same)
        return any(item.kv_cache_dtype == parse_kv_dtype(kv_cache_dtype).dtype for item in same)

    def _measure(
        self, path: Path, stage: str, engine: dict[str, Any], vocab: int | None
    ) -> RowResult:
        job = self._plan.job(path, engine, self._rows_path, vocab)
        return self._run(job, lambda percent, note: self._on_progress(stage, percent, 100, note))


def _measure_here(job: RowJob, on_percent: OnPercent) -> RowResult:
    return measure(job, on_percent, own_process=False)


def _row(
    method: Method, windows: list[Window], item: _Measured, baseline: Scores, *, first: bool
) -> EvaluationRow:
    result = item.result
    scores = result.scores()
    return EvaluationRow(
        model=item.label,
        baseline=first,
        weights=result.weights,
        dtype=result.dtype,
        kv_cache_dtype=result.kv_cache_dtype,
        quality=quality(method, scores, baseline),
        divergence=divergence(windows, scores, baseline),
        memory=result.memory,
        speed=result.speed,
        kernels=result.kernels,
        seconds=result.seconds,
    )


def _read_text(path: Path | None) -> tuple[str, bytes]:
    """Return the text's name and its bytes.

    Raises:
        ConfigError: it cannot be read, or is no UTF-8.
    """
    if path is None:
        return DEFAULT_TEXT, evaluation_text().encode("utf-8")
    try:
        content = Path(path).read_bytes()
        content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text {path} cannot be read: {error}") from error
    return Path(path).name, content


def _labels(given: list[str], paths: list[Path], chosen: Sequence[str] | None) -> list[str]:
    """Return the chosen names, or the last part of what was given where that is unambiguous."""
    if chosen is not None:
        if len(chosen) != len(given):
            raise ConfigError(f"{len(chosen)} labels for a baseline and {len(given) - 1} models")
        return list(chosen)
    short = [Path(name).name or name for name in given]
    owners: dict[str, set[Path]] = {}
    for name, path in zip(short, paths, strict=True):
        owners.setdefault(name, set()).add(path)
    return [
        name if len(owners[name]) == 1 else full for name, full in zip(short, given, strict=True)
    ]
