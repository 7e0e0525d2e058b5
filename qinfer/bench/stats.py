"""Percentiles of measured times: one method, stated, with the number of samples beside it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

PERCENTILE_METHOD: Final = "linear"  # numpy's name: interpolate between the two nearest samples
MIN_COUNT_FOR_P99 = 100  # below it p99 is hardly more than the largest sample


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The distribution of one measured quantity, in the quantity's own unit (times: seconds).

    Args:
        p50: median.
        p90: 90th percentile.
        p95: 95th percentile.
        p99: 99th percentile; see `p99_reliable`.
        mean: arithmetic mean.
        count: samples behind the figures.
    """

    p50: float
    p90: float
    p95: float
    p99: float
    mean: float
    count: int

    @property
    def p99_reliable(self) -> bool:
        """Whether there are enough samples for p99 to be more than the slowest of them."""
        return self.count >= MIN_COUNT_FOR_P99

    def to_dict(self) -> dict[str, float | int | bool]:
        """Return the figures for a JSON record."""
        return {**asdict(self), "p99_reliable": self.p99_reliable}


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return p50, p90, p95, p99 (`PERCENTILE_METHOD`), mean and count of `values`.

    Raises:
        ValueError: there are no values, or one is not finite.
    """
    samples = np.asarray(values, dtype=np.float64)  # [count]
    if samples.size == 0:
        raise ValueError("percentiles of no samples")
    if not np.isfinite(samples).all():
        raise ValueError("percentiles of samples that are not finite")
    p50, p90, p95, p99 = np.percentile(samples, [50, 90, 95, 99], method=PERCENTILE_METHOD)
    mean = float(samples.mean())
    return Percentiles(float(p50), float(p90), float(p95), float(p99), mean, int(samples.size))
