import math

from hypothesis import given
from hypothesis import strategies as st

from qinfer.engine.latency import RATE_WINDOW_SECONDS, Clock, Histogram, Latencies, Rate
from qinfer.engine.request import TokenEvent, Usage


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=6, unique=True).map(sorted),
    st.lists(st.floats(0, 200), max_size=50),
)
def test_histograms_count_as_prometheus_does(bounds, values):
    histogram = Histogram(bounds)
    for value in values:
        histogram.add(value)
    lower = -math.inf
    for bound, count in zip([*bounds, math.inf], histogram.counts, strict=True):
        assert count == sum(lower < value <= bound for value in values)
        lower = bound
    assert histogram.count == len(values)
    assert histogram.total == sum(values)


def test_the_rate_is_that_of_the_last_full_seconds():
    rate = Rate()
    assert rate.per_second(0.0) == 0
    for tenth in range(200):
        rate.add(3, 100 + tenth / 10)  # 30 per second for 20 seconds
    assert rate.per_second(119.95) == 30
    assert rate.per_second(120.0) == 30
    assert rate.per_second(125.0) == 15  # nothing came for five of the ten seconds
    assert rate.per_second(120 + RATE_WINDOW_SECONDS) == 0


def end(reason, tokens=0, queue=None):
    usage = Usage(5, tokens) if reason in {"stop", "length"} else None
    return TokenEvent("x", (), "", finish_reason=reason, usage=usage, queue_seconds=queue)


def test_s09_times_are_those_of_the_tokens():
    latencies, clock = Latencies(), Clock(10.0)
    for now in (10.5, 10.6, 10.8):
        latencies.delivered(clock, 1, now)
    times = latencies.finished(clock, end("stop", 3, queue=0.25), 10.9)
    assert times.queue == 0.25
    assert times.tokens == 3
    assert math.isclose(times.ttft or 0, 0.5)
    assert math.isclose(times.tpot or 0, 0.15)
    assert math.isclose(times.total, 0.9)
    assert (latencies.ttft.count, latencies.inter_token.count) == (1, 2)
    assert math.isclose(latencies.inter_token.total, 0.3)
    assert math.isclose(latencies.time_per_token.total, 0.15)
    assert (latencies.prompt_tokens.total, latencies.generation_tokens.total) == (5, 3)
    assert latencies.ended == {"stop": 1}


def test_s09_what_clients_cut_short_is_counted_apart():
    latencies = Latencies()
    clock = Clock(0.0)
    latencies.delivered(clock, 1, 1.0)
    times = latencies.finished(clock, end("abort"), 1.5)
    assert (times.ttft, times.tpot, times.queue, times.tokens) == (1.0, None, None, 1)
    latencies.finished(Clock(0.0), end("error"), 2.0)
    assert latencies.ttft.count == 1  # it did produce a token
    assert latencies.total.count == latencies.time_per_token.count == latencies.queue.count == 0
    assert latencies.ended == {"abort": 1, "error": 1}


def test_several_tokens_of_one_step_are_one_delivery():
    latencies, clock = Latencies(), Clock(0.0)
    latencies.delivered(clock, 1, 1.0)
    latencies.delivered(clock, 4, 1.2)  # an accepted draft
    times = latencies.finished(clock, end("length", 5), 1.2)
    assert latencies.inter_token.count == 1
    assert math.isclose(times.tpot or 0, 0.05)
