"""Percentiles against numbers worked out by hand."""

import pytest

from qinfer.bench.stats import percentiles


def test_linear_interpolation_by_hand():
    result = percentiles([4.0, 1.0, 3.0, 2.0])
    assert result.p50 == pytest.approx(2.5)
    assert result.p90 == pytest.approx(1 + 0.9 * 3)
    assert result.p95 == pytest.approx(1 + 0.95 * 3)
    assert result.p99 == pytest.approx(1 + 0.99 * 3)
    assert result.mean == pytest.approx(2.5)
    assert result.count == 4


def test_b09_p99_of_few_samples_is_flagged():
    assert not percentiles([0.1] * 99).p99_reliable
    assert percentiles([0.1] * 100).p99_reliable
    assert percentiles([0.1] * 99).to_dict()["p99_reliable"] is False


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_no_figures_from_nothing(values):
    with pytest.raises(ValueError, match="percentiles of"):
        percentiles(values)
