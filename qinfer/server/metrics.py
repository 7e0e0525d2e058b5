"""GET /metrics: the engine's and the server's numbers as Prometheus text, with vLLM's names.

Nothing is counted here: numbers that others keep are read when somebody asks, so a scrape and the
live view can never disagree, and a token costs no more for being watched. Only the prefix differs
from vLLM: `qinfer:`. A prompt with `n` samples counts as `n` sequences wherever sequences are
counted, as it does there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from qinfer import __version__
from qinfer.engine.latency import Histogram
from qinfer.engine.metrics import EngineStats
from qinfer.engine.request import FinishReason
from qinfer.server.lifecycle import Lifecycle
from qinfer.server.observer import HttpCounts
from qinfer.server.settings import OperationSettings

PREFIX: Final = "qinfer:"
FINISH_REASONS: Final[tuple[FinishReason, ...]] = ("stop", "length", "abort", "error")


def make_registry(
    model: str, lifecycle: Lifecycle, http: HttpCounts, settings: OperationSettings
) -> CollectorRegistry:
    """Return a registry of this server alone; two servers in one process share nothing.

    Args:
        model: the served name, a label of everything about the engine.
        lifecycle: knows the engine and the server's state.
        http: counts of requests.
        settings: memory sizes and logs.
    """
    registry = CollectorRegistry()
    registry.register(_Numbers(model, lifecycle, http, settings))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


@dataclass(frozen=True, slots=True, eq=False)  # a registry tells collectors apart by identity
class _Numbers(Collector):
    """Reads the numbers at every scrape."""

    model: str
    lifecycle: Lifecycle
    http: HttpCounts
    settings: OperationSettings

    def collect(self) -> Iterator[Metric]:
        """Return all metrics."""
        stats = self.lifecycle.engine.stats()
        yield from self._engine_gauges(stats)
        yield from self._engine_counters(stats)
        yield from self._histograms()
        yield from self._server()

    def _engine_gauges(self, stats: EngineStats) -> Iterator[Metric]:
        used = (stats.num_blocks - stats.free_blocks) / max(stats.num_blocks, 1)
        yield self._gauge(
            "num_requests_running", "Sequences that hold cache blocks.", stats.running
        )
        yield self._gauge("num_requests_waiting", "Sequences that wait.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "Used part of the KV cache; 1 = all.", used)
        yield self._gauge("kv_cache_blocks", "Blocks of the KV cache.", stats.num_blocks)
        yield self._gauge(
            "generation_tokens_per_second",
            "Tokens generated per second, over the last ten.",
            self.lifecycle.rate(),
        )

    def _engine_counters(self, stats: EngineStats) -> Iterator[Metric]:
        tokens = {
            "prompt_tokens": ("Prompt tokens of requests taken on.", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated.", stats.generation_tokens),
            "computed_tokens": (
                "Tokens that went through the model, recomputed ones included.",
                stats.computed_tokens,
            ),
            "prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_query_tokens,
            ),
            "prefix_cache_hits": ("Of them, those found.", stats.prefix_hit_tokens),
            "shared_prompt_tokens": (
                "Prompt tokens that a sample took over from another one of its prompt.",
                stats.shared_tokens,
            ),
            "num_preemptions": ("Times a sequence lost its cache blocks.", stats.preemptions),
            "spec_decode_num_draft_tokens": ("Tokens proposed by drafts.", stats.draft_tokens),
            "spec_decode_num_accepted_tokens": (
                "Of them, those that came true.",
                stats.accepted_draft_tokens,
            ),
        }
        for name, (text, value) in tokens.items():
            yield self._counter(name, text, value)
        family = CounterMetricFamily(
            f"{PREFIX}request_success",
            "Sequences that ended, by reason; abort = the client left, error = it failed.",
            labels=["model_name", "finished_reason"],
        )
        ended = self.lifecycle.engine.latencies.ended
        for reason in FINISH_REASONS:
            family.add_metric([self.model, reason], ended[reason])
        yield family

    def _histograms(self) -> Iterator[Metric]:
        latencies = self.lifecycle.engine.latencies
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", latencies.ttft),
            ("inter_token_latency_seconds", "Between two deliveries.", latencies.inter_token),
            (
                "time_per_output_token_seconds",
                "(last - first) / (tokens - 1) of each sequence.",
                latencies.time_per_token,
            ),
            ("e2e_request_latency_seconds", "Arrival to end of each sequence.", latencies.total),
            ("request_queue_time_seconds", "Arrival to the first step.", latencies.queue),
            ("request_prompt_tokens", "Lengths of prompts.", latencies.prompt_tokens),
            ("request_generation_tokens", "Lengths of answers.", latencies.generation_tokens),
        ):
            family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self.model], _buckets(histogram), histogram.total)
            yield family

    def _server(self) -> Iterator[Metric]:
        healthy = int(self.lifecycle.engine.healthy)
        yield self._gauge("engine_healthy", "1 while the engine runs.", healthy)
        info = GaugeMetricFamily(f"{PREFIX}build_info", "Always 1.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        memory = GaugeMetricFamily(f"{PREFIX}memory_bytes", "Memory by use.", labels=["kind"])
        for kind, size in self.settings.memory.items():
            memory.add_metric([kind], size)
        yield memory
        yield GaugeMetricFamily(
            f"{PREFIX}http_requests_in_progress", "Being answered.", self.http.in_progress
        )
        responses = CounterMetricFamily(
            f"{PREFIX}http_requests",
            "HTTP requests that ended; status 499 = the client left before the response.",
            labels=["route", "method", "status"],
        )
        for (route, method, status), count in sorted(self.http.responses.items()):
            responses.add_metric([route, method, str(status)], count)
        yield responses
        yield from self._log_lines()

    def _log_lines(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            f"{PREFIX}log_lines", "Lines by log and fate.", labels=["log", "fate"]
        )
        logs = (("request", self.settings.request_log), ("audit", self.settings.audit_log))
        for name, log in logs:
            if log is not None:
                family.add_metric([name, "written"], log.written)
                family.add_metric([name, "dropped"], log.dropped)
        yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return Prometheus' cumulative buckets."""
    total = 0
    result = []
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, histogram.counts, strict=True):
        total += count
        result.append((bound, float(total)))
    return result
