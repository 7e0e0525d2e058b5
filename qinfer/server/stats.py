"""GET /v1/qinfer/stats: the numbers behind the page's live view, in one cheap read."""

import time
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import BaseModel

from qinfer import __version__
from qinfer.engine.latency import Histogram
from qinfer.engine.metrics import EngineStats
from qinfer.engine.request import FinishReason
from qinfer.host import peak_rss
from qinfer.server.lifecycle import Lifecycle, State
from qinfer.server.service import Service


class HistogramStats(BaseModel):
    """Counts of seconds: `counts[i]` values up to `bounds[i]`, and one more count for the rest."""

    bounds: list[float]
    counts: list[int]
    sum: float


@dataclass(frozen=True, slots=True)
class EngineNumbers(EngineStats):
    """The engine now, and its totals; what each is stands in `engine.metrics.EngineStats`.

    `ended` counts every sequence once, those that failed with the engine too; `finished` those
    that the engine itself brought to an end.
    """

    ended: dict[FinishReason, int]
    generation_tokens_per_second: float


class ServerNumbers(BaseModel):
    """The server now: where it is in its life, and the requests that it answers."""

    version: str
    state: State
    reason: str | None
    uptime: float
    models: list[str]
    requests_in_work: int


class Stats(BaseModel):
    """Answer of /v1/qinfer/stats.

    Histograms cover the time since the start. `memory` holds bytes; `limits` tokens, sequences or
    requests, as their names say.
    """

    object: Literal["qinfer.stats"] = "qinfer.stats"
    server: ServerNumbers
    engine: EngineNumbers
    ttft: HistogramStats
    tpot: HistogramStats
    itl: HistogramStats
    e2e: HistogramStats
    queue: HistogramStats
    memory: dict[str, int]
    limits: dict[str, int]


def live_stats(service: Service, lifecycle: Lifecycle) -> Stats:
    """Return the server's numbers now."""
    latencies = service.engine.latencies
    operations = service.settings.operations
    return Stats(
        server=ServerNumbers(
            version=__version__,
            state=lifecycle.state,
            reason=lifecycle.reason,
            uptime=round(time.monotonic() - lifecycle.born, 3),
            models=list(service.settings.served_model_names),
            requests_in_work=lifecycle.in_work,
        ),
        engine=EngineNumbers(
            **asdict(service.engine.stats()),
            ended={**latencies.ended},
            generation_tokens_per_second=lifecycle.rate(),
        ),
        ttft=_histogram(latencies.ttft),
        tpot=_histogram(latencies.time_per_token),
        itl=_histogram(latencies.inter_token),
        e2e=_histogram(latencies.total),
        queue=_histogram(latencies.queue),
        memory={**operations.memory, "peak_rss_bytes": peak_rss()},
        limits={
            "max_model_len": service.settings.max_model_len,
            "max_concurrent_requests": operations.max_concurrent_requests,
            "max_body_bytes": service.settings.max_body_bytes,
            **operations.limits,
        },
    )


def _histogram(histogram: Histogram) -> HistogramStats:
    return HistogramStats(
        bounds=list(histogram.bounds), counts=list(histogram.counts), sum=histogram.total
    )
