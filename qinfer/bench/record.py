"""The record of a benchmark: figures with the method and the machine behind them.

Two records are comparable only if they were measured the same way on the same machine; what may
differ is the model, its weights, its cache, and whether tokens were drafted.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from qinfer.errors import MethodMismatchError
from qinfer.report.jsonio import read_record
from qinfer.report.record import FORMAT_VERSION, Environment, SpeedFigures

# Of the environment; the rest may differ between two runs on one machine.
_MACHINE = ("cpu", "device", "threads")
_MAY_DIFFER = {"speculative"}  # of the method: drafts change the speed and nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchMemory:
    """Bytes while the benchmark ran.

    Args:
        weights_bytes: resident weights.
        kv_bytes_per_token: codes and scales of K and V over all layers.
        kv_allocated_bytes: the cache pool.
        kv_peak_bytes: of it, held at the busiest moment.
        process_peak_bytes: largest resident size of the process, loading included.
    """

    weights_bytes: int
    kv_bytes_per_token: int
    kv_allocated_bytes: int
    kv_peak_bytes: int
    process_peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRecord:
    """What `qinfer bench` measured: one row per concurrency.

    Args:
        model: as it was named.
        dtype: of activations and unquantized weights.
        kv_cache_dtype: resolved type of the KV cache.
        method: how it was measured; see `qinfer.bench.offline.offline_method`.
        environment: what it ran on.
        memory: bytes.
        rows: the figures.
    """

    format_version: int = FORMAT_VERSION
    kind: str = "bench"
    model: str
    dtype: str
    kv_cache_dtype: str
    method: dict[str, Any]
    environment: Environment
    memory: BenchMemory
    rows: tuple[SpeedFigures, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> "BenchRecord":
        """Read what `to_dict` wrote.

        Raises:
            ConfigError: another kind or version, a missing or unknown field, or a wrong type.
        """
        return read_record(cls, data, kind="bench", version=FORMAT_VERSION)


def require_same_method(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    first_environment: Environment,
    second_environment: Environment,
) -> None:
    """Refuse to compare measurements that were taken differently or on different machines.

    Args:
        first: method of one measurement.
        second: method of the other.
        first_environment: where the first ran.
        second_environment: where the other ran.

    Raises:
        MethodMismatchError: lists every difference with both values.
    """
    one, other = asdict(first_environment), asdict(second_environment)
    names = sorted({*first, *second} - _MAY_DIFFER)
    pairs = {name: (first.get(name), second.get(name)) for name in names}
    pairs |= {name: (one[name], other[name]) for name in _MACHINE}
    differing = [f"{name} ({a} / {b})" for name, (a, b) in pairs.items() if a != b]
    if differing:
        raise MethodMismatchError(
            f"the two measurements cannot be compared; they differ in {', '.join(differing)}"
        )
