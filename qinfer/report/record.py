"""The JSON that every measurement is kept in: plain dataclasses, written and read strictly.

`docs/reference/json.md` documents the fields. Within one `FORMAT_VERSION` fields keep their names,
units and meaning; a reader refuses versions, kinds and fields it does not know. Torch-free.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from qinfer.report.jsonio import read_record

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How quality was measured; two figures may be compared only if all of this is equal.

    Args:
        text: name of the text.
        text_sha256: of the text's bytes.
        tokens_sha256: of the windows' token ids and scored ranges: same tokens, same cuts.
        join: how the text was turned into tokens.
        window: tokens a model sees at once.
        stride: tokens from one window's start to the next.
        bos: a BOS token was put in front of each window.
        num_windows: windows scored.
        tokens_scored: predictions that count.
        bytes_scored: UTF-8 bytes of the scored tokens.
        words_scored: white-space separated words in them.
        dtype: type of activations and unquantized weights of the measured models.
        baseline: label of what drift and divergence refer to.
        baseline_sha256: of the baseline's config.json and weight files.
        baseline_dtype: type of the baseline's activations and weights.
        baseline_kv_cache_dtype: type of the baseline's KV cache.
        divergence: direction and unit of the KL divergence.
    """

    text: str
    text_sha256: str
    tokens_sha256: str
    join: str
    window: int
    stride: int
    bos: bool
    num_windows: int
    tokens_scored: int
    bytes_scored: int
    words_scored: int
    dtype: str
    baseline: str
    baseline_sha256: str
    baseline_dtype: str
    baseline_kv_cache_dtype: str
    divergence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the measurement ran on."""

    qinfer: str
    torch: str
    python: str
    platform: str
    cpu: str
    device: str
    threads: int
    created: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Perplexity and its drift against the baseline.

    Args:
        perplexity: exp(sum of NLL / scored tokens).
        perplexity_interval: 95 % bootstrap over windows; None for one window.
        bits_per_byte: NLL in bits per UTF-8 byte of scored text.
        word_perplexity: exp(sum of NLL / words); None where no finite number.
        drift_percent: how far the perplexity lies above the baseline's.
        drift_interval: 95 % paired bootstrap over windows; None for one window.
    """

    perplexity: float
    perplexity_interval: tuple[float, float] | None
    bits_per_byte: float
    word_perplexity: float | None
    drift_percent: float
    drift_interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextDrift:
    """Drift of the tokens whose context has `context_from` to `context_to` tokens."""

    context_from: int
    context_to: int
    tokens: int
    kld_mean: float
    drift_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceFigures:
    """KL(baseline || model) in nats per scored token, and agreement from 0 to 1."""

    mean: float
    p99: float
    p99_9: float
    max: float
    top1_agreement: float
    by_context: tuple[ContextDrift, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """Bytes of one row.

    Args:
        weights_bytes: resident weights.
        checkpoint_bytes: tensors on disk.
        kv_bytes_per_token: codes and scales of K and V over all layers.
        kv_allocated_bytes: size of the cache pool.
        kv_peak_bytes: most that requests used of it at once.
        process_start_bytes: resident memory before the model was loaded (Python, torch).
        process_peak_bytes: highest resident memory of loading and the timed requests, in a
            process of its own; None where rows shared a process, whose peak belongs to none.
    """

    weights_bytes: int
    checkpoint_bytes: int
    kv_bytes_per_token: int
    kv_allocated_bytes: int
    kv_peak_bytes: int
    process_start_bytes: int | None
    process_peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeFigures:
    """The distribution of a time in seconds over `count` requests; below 100, p99 says little."""

    p50: float
    p90: float
    p95: float
    p99: float
    mean: float
    count: int
    p99_reliable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFigures:
    """Speed at one concurrency.

    Args:
        concurrency: requests in flight at once.
        input_len: prompt tokens of each; likewise `output_len`.
        num_requests: measured requests; `num_failed` of them are in no other figure.
        ttft_seconds: arrival to the first token.
        tpot_seconds: (last - first) / (tokens - 1).
        latency_seconds: arrival to the last token.
        output_tokens_per_second: generated tokens over wall time.
        total_tokens_per_second: prompt and generated tokens over wall time.
    """

    concurrency: int
    input_len: int
    output_len: int
    num_requests: int
    num_failed: int
    ttft_seconds: TimeFigures
    tpot_seconds: TimeFigures
    latency_seconds: TimeFigures
    output_tokens_per_second: float
    total_tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """One (checkpoint, KV type).

    Args:
        model: label of the checkpoint.
        baseline: this row is what the others are compared with.
        weights: scheme of the weights, such as `bf16` or `int4 g64 sym`.
        dtype: type of activations and unquantized weights.
        kv_cache_dtype: resolved type of the KV cache.
        quality: perplexity and drift.
        divergence: against the baseline; the baseline's own is zero by definition.
        memory: bytes.
        speed: one entry per concurrency; empty if not measured.
        kernels: implementation to number of layers that it runs.
        seconds: wall time of the row, loading included.
    """

    model: str
    baseline: bool
    weights: str
    dtype: str
    kv_cache_dtype: str
    quality: Quality
    divergence: DivergenceFigures
    memory: MemoryFigures
    speed: tuple[SpeedFigures, ...]
    kernels: dict[str, int]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """What `qinfer eval` measured: one row per (checkpoint, KV type), the baseline first.

    Args:
        method: how quality was measured.
        speed_method: how speed was measured, as `qinfer bench` records it; None = it was not.
        environment: what it ran on.
        rows: the figures.
    """

    format_version: int = FORMAT_VERSION
    kind: str = "evaluation"
    method: Method
    speed_method: dict[str, Any] | None
    environment: Environment
    rows: tuple[EvaluationRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> "EvaluationRecord":
        """Read what `to_dict` wrote.

        Raises:
            ConfigError: another kind or version, a missing or unknown field, or a wrong type.
        """
        return read_record(cls, data, kind="evaluation", version=FORMAT_VERSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of a run and how long it took."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSummary:
    """What quantizing did, in short; the checkpoint keeps the report in full."""

    model: str
    output: str
    reused: bool
    modules: int
    fallback_modules: tuple[str, ...]
    mean_relative_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What `qinfer run` and `qinfer demo` write: quantization, evaluation and remarks."""

    format_version: int = FORMAT_VERSION
    kind: str = "run"
    title: str
    notes: tuple[str, ...]
    stages: tuple[Stage, ...]
    quantization: QuantizationSummary
    evaluation: EvaluationRecord
    recipe: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> "RunRecord":
        """Read what `to_dict` wrote; raises ConfigError like `EvaluationRecord.from_dict`."""
        return read_record(cls, data, kind="run", version=FORMAT_VERSION)
