"""A made-up evaluation record, for tests of what is written and drawn from one."""

from typing import Any

from qinfer.report.record import (
    ContextDrift,
    DivergenceFigures,
    Environment,
    EvaluationRecord,
    EvaluationRow,
    MemoryFigures,
    Method,
    Quality,
    QuantizationSummary,
    RunRecord,
    SpeedFigures,
    Stage,
    TimeFigures,
)

METHOD = Method(
    text="evaluation.txt",
    text_sha256="ab" * 32,
    tokens_sha256="cd" * 32,
    join="one piece",
    window=512,
    stride=512,
    bos=False,
    num_windows=8,
    tokens_scored=4088,
    bytes_scored=18000,
    words_scored=3000,
    dtype="auto",
    baseline="base-model",
    baseline_sha256="ef" * 32,
    baseline_dtype="bfloat16",
    baseline_kv_cache_dtype="fp16",
    divergence="KL(baseline || model), nats per token",
)

ENVIRONMENT = Environment(
    qinfer="0.1.0",
    torch="2.13.0",
    python="3.11.2",
    platform="Linux x86_64",
    cpu="A processor",
    device="cpu",
    threads=2,
    created="2026-11-29T18:00:00+00:00",
)


def make_row(model: str = "small-int4", kv: str = "int8", **changes: Any) -> EvaluationRow:
    """Return a row whose figures are plausible; `changes` replace fields."""
    times = TimeFigures(p50=0.2, p90=0.3, p95=0.3, p99=0.3, mean=0.21, count=4, p99_reliable=False)
    fields: dict[str, Any] = {
        "model": model,
        "baseline": False,
        "weights": "int4 g64 sym",
        "dtype": "bfloat16",
        "kv_cache_dtype": kv,
        "quality": Quality(
            perplexity=23.5,
            perplexity_interval=(20.1, 26.9),
            bits_per_byte=0.98,
            word_perplexity=81.2,
            drift_percent=4.25,
            drift_interval=(3.5, 5.0),
        ),
        "divergence": DivergenceFigures(
            mean=0.041,
            p99=0.4,
            p99_9=1.1,
            max=2.5,
            top1_agreement=0.915,
            by_context=(
                ContextDrift(
                    context_from=1, context_to=31, tokens=248, kld_mean=0.05, drift_percent=5.0
                ),
                ContextDrift(
                    context_from=32, context_to=127, tokens=768, kld_mean=0.04, drift_percent=4.0
                ),
            ),
        ),
        "memory": MemoryFigures(
            weights_bytes=120_000_000,
            checkpoint_bytes=118_000_000,
            kv_bytes_per_token=11_880,
            kv_allocated_bytes=10_000_000,
            kv_peak_bytes=6_000_000,
            process_start_bytes=300_000_000,
            process_peak_bytes=560_000_000,
        ),
        "speed": (
            SpeedFigures(
                concurrency=1,
                input_len=128,
                output_len=32,
                num_requests=2,
                num_failed=0,
                ttft_seconds=times,
                tpot_seconds=times,
                latency_seconds=times,
                output_tokens_per_second=18.0,
                total_tokens_per_second=90.0,
            ),
        ),
        "kernels": {"reference.packed": 210, "reference.dense": 1},
        "seconds": 12.5,
    }
    return EvaluationRow(**(fields | changes))


def make_record(*rows: EvaluationRow) -> EvaluationRecord:
    """Return a record of a baseline row and `rows` (by default one)."""
    same = DivergenceFigures(
        mean=0.0, p99=0.0, p99_9=0.0, max=0.0, top1_agreement=1.0, by_context=()
    )
    baseline = make_row("base-model", "fp16", baseline=True, weights="bf16", divergence=same)
    return EvaluationRecord(
        method=METHOD,
        speed_method={"benchmark": "offline", "seed": 0, "num_requests": None},
        environment=ENVIRONMENT,
        rows=(baseline, *(rows or (make_row(),))),
    )


def make_run() -> RunRecord:
    """Return the record of a run around `make_record()`."""
    return RunRecord(
        title="A run",
        notes=("A remark with <markup> & more.",),
        stages=(Stage(name="quantize", seconds=60.0), Stage(name="evaluate", seconds=90.0)),
        quantization=QuantizationSummary(
            model="base-model",
            output="small-int4",
            reused=False,
            modules=210,
            fallback_modules=(),
            mean_relative_error=0.01,
        ),
        evaluation=make_record(),
        recipe={"name": "x"},
    )
