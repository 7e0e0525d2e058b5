"""What quantizing did, module by module: kept in the checkpoint as `quantize_report.json`.

What varies between equal runs (time, memory, where work was continued) is in the object but not in
the file.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
REPORT_NAME = "quantize_report.json"


@dataclass(frozen=True, slots=True)
class QuantProgress:
    """One step of a stage, for a progress display.

    Args:
        stage: what is going on.
        done: steps finished.
        total: steps of the stage.
        note: the step's result in a few words.
        seconds_left: of the stage, by the pace so far; None = not known.
    """

    stage: str
    done: int
    total: int
    note: str = ""
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """What became of one linear.

    Args:
        name: module name.
        in_features: columns of its weight.
        out_features: rows of its weight.
        scheme: such as `int4 g64 sym`; None = left as it was.
        error: relative squared error of its outputs on the calibration tokens (`gptq`) or of its
            weight (`rtn`); None = not computed (left as it was, or a dry run).
        damp_percent: the damping that GPTQ needed; None = rounding.
        attempts: dampings tried.
        num_tokens: calibration tokens that it saw.
        fallback: why GPTQ gave way to rounding.
        skipped: why it was left as it was.
    """

    name: str
    in_features: int
    out_features: int
    scheme: str | None
    error: float | None = None
    damp_percent: float | None = None
    attempts: int = 0
    num_tokens: int = 0
    fallback: str | None = None
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes before and after.

    Args:
        source_bytes: tensors of the source checkpoint.
        output_bytes: tensors of the checkpoint written; for a dry run, expected.
        skip_cost_bytes: what modules that do not fit the format add to it.
    """

    source_bytes: int
    output_bytes: int
    skip_cost_bytes: int


@dataclass(frozen=True, slots=True)
class QuantReport:
    """The result of quantizing, or of planning to (`out` is None).

    Args:
        config: the options, as `QuantizeConfig.to_dict` gives them.
        scheme: of the modules that no override touches.
        rows: every linear, in the model's order.
        calibration: what text was used; None for `rtn`.
        sizes: bytes before and after.
        arithmetic: what decided how the sums of the calibration were rounded; None without one.
        under_seen_experts: experts that few calibration tokens reached, with their counts.
        conditioning: what KV conditioning did.
        allocation: how bits were chosen module by module.
        out: where the checkpoint is; None = dry run.
        resumed_at: the block at which an earlier run was continued; None = none was.
        seconds: wall time of this run.
        peak_rss_bytes: the process's peak memory.
    """

    config: dict[str, Any]
    scheme: str
    rows: tuple[ModuleRow, ...]
    calibration: dict[str, Any] | None
    sizes: Sizes
    arithmetic: dict[str, str] | None = None
    under_seen_experts: dict[str, Any] = field(default_factory=dict)
    conditioning: dict[str, Any] = field(default_factory=dict)
    allocation: dict[str, Any] = field(default_factory=dict)
    out: Path | None = None
    resumed_at: int | None = None
    seconds: float = 0.0
    peak_rss_bytes: int = 0

    @property
    def fallback_modules(self) -> tuple[ModuleRow, ...]:
        """Modules where GPTQ gave way to rounding."""
        return tuple(row for row in self.rows if row.fallback is not None)

    @property
    def skipped_modules(self) -> tuple[ModuleRow, ...]:
        """Modules left as they were."""
        return tuple(row for row in self.rows if row.skipped is not None)

    @property
    def mean_error(self) -> float:
        """Mean of the modules' relative errors; 0 where there are none."""
        errors = [row.error for row in self.rows if row.error is not None]
        return sum(errors) / len(errors) if errors else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return what is kept: equal inputs give equal content."""
        return {
            "format_version": FORMAT_VERSION,
            "config": self.config,
            "scheme": self.scheme,
            "calibration": self.calibration,
            "arithmetic": self.arithmetic,
            "error_of": "outputs" if self.config["algorithm"] == "gptq" else "weights",
            "mean_error": self.mean_error,
            "num_modules": len(self.rows),
            "fallback_modules": _listing(self.fallback_modules, "fallback"),
            "skipped_modules": _listing(self.skipped_modules, "skipped"),
            "under_seen_experts": self.under_seen_experts,
            "conditioning": self.conditioning,
            "allocation": self.allocation,
            "sizes": asdict(self.sizes),
            "modules": [asdict(row) for row in self.rows],
        }


def _listing(rows: Sequence[ModuleRow], field: str) -> dict[str, Any]:
    entries = [{"name": row.name, "reason": asdict(row)[field]} for row in rows]
    return {"count": len(entries), "modules": entries}
