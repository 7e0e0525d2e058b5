"""The benchmark's record survives JSON, and unlike measurements are not compared."""

import json
from dataclasses import replace
from typing import Any

import pytest

from qinfer.bench.record import BenchMemory, BenchRecord, require_same_method
from qinfer.errors import ConfigError, MethodMismatchError
from qinfer.report.environment import describe
from qinfer.report.jsonio import dump_json
from qinfer.report.record import SpeedFigures, TimeFigures

TIMES = TimeFigures(p50=0.1, p90=0.2, p95=0.2, p99=0.3, mean=0.1, count=8, p99_reliable=False)


def record(**changes):
    speed = SpeedFigures(
        concurrency=1,
        input_len=8,
        output_len=4,
        num_requests=8,
        num_failed=0,
        ttft_seconds=TIMES,
        tpot_seconds=TIMES,
        latency_seconds=TIMES,
        output_tokens_per_second=10.0,
        total_tokens_per_second=30.0,
    )
    values: dict[str, Any] = {
        "model": "m",
        "dtype": "float32",
        "kv_cache_dtype": "int8",
        "method": {"input_len": 8, "seed": 0},
        "environment": describe(device="cpu", threads=2),
        "memory": BenchMemory(
            weights_bytes=1,
            kv_bytes_per_token=2,
            kv_allocated_bytes=3,
            kv_peak_bytes=2,
            process_peak_bytes=9,
        ),
        "rows": (speed,),
    }
    return BenchRecord(**values | changes)


def test_written_and_read_back():
    data = json.loads(dump_json(record().to_dict()))
    assert BenchRecord.from_dict(data) == record(
        environment=replace(record().environment, created=data["environment"]["created"])
    )
    with pytest.raises(ConfigError, match="format_version"):
        BenchRecord.from_dict(data | {"format_version": 99})


def compare(first, second):
    require_same_method(first.method, second.method, first.environment, second.environment)


def test_unlike_measurements_are_refused():
    compare(record(), record(kv_cache_dtype="fp32", model="other"))
    drafted = {"input_len": 8, "seed": 0, "speculative": "ngram, up to 4 tokens"}
    compare(record(), record(method=drafted))
    with pytest.raises(MethodMismatchError, match=r"input_len \(8 / 9\)"):
        compare(record(), record(method={"input_len": 9, "seed": 0}))
    with pytest.raises(MethodMismatchError, match=r"warmup \(None / x\)"):
        compare(record(), record(method={"input_len": 8, "seed": 0, "warmup": "x"}))
    with pytest.raises(MethodMismatchError, match=r"threads \(2 / 4\)"):
        compare(record(), record(environment=describe(device="cpu", threads=4)))
