"""`--target-bits` and `--target-size`: bits and group size per module, from what each one costs.

Modules that run as one (q, k and v; gate and up; all linears of all experts of a layer) share a
form, so that they stay fused here and in other engines.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from qinfer.checkpoint.partial import PartialDirectory
from qinfer.errors import ConfigError
from qinfer.quant.allocate import Allocation, Choice, allocate
from qinfer.quant.calibration import CalibrationSet
from qinfer.quant.config import Override
from qinfer.quant.job import Job, OnProgress, block_name
from qinfer.quant.report import QuantProgress
from qinfer.quant.rows_store import RowsStore
from qinfer.quant.sensitivity import LinearSensitivity, SensitivityRun
from qinfer.quant.targets import ALLOCATED, Plan, Target
from qinfer.quant.workers import Workers
from qinfer.schemes import WeightScheme

_NOTE = "allocation"
NUM_WINDOWS = 8  # of the calibration text; gradients cost three times what activations do
FORMS = (
    (2, 32), (2, 64), (3, 32), (3, 64), (3, 128), (4, 32), (4, 64), (4, 128), (8, 64), (8, None),
)  # fmt: skip
_SCALE_BITS = 16
_KINDS = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Unit:
    """Modules that get one form.

    Args:
        name: for reports, such as `model.layers.0.qkv`.
        targets: the modules.
        schemes: the forms that all of them can take; None = unquantized.
    """

    name: str
    targets: tuple[Target, ...]
    schemes: tuple[WeightScheme | None, ...]

    @property
    def pattern(self) -> str:
        """A regular expression that finds these modules and no others."""
        names = "|".join(target.name.replace(".", r"\.") for target in self.targets)
        return f"^(?:{names})$"

    def scheme(self, label: str) -> WeightScheme | None:
        """Return the form of this label."""
        return next(scheme for scheme in self.schemes if _label(scheme) == label)


def allocated(
    job: Job,
    calibration: CalibrationSet,
    workers: Workers,
    on_progress: OnProgress,
    *,
    partial: PartialDirectory | None = None,
    room: int = 0,
) -> tuple[Job, dict[str, Any]]:
    """Choose bits and group sizes so that the model fits the size asked for and drifts least.

    Args:
        job: with `target_bits` or `target_size`; modules that an override names keep what it says.
        calibration: its first `NUM_WINDOWS` windows are used.
        workers: the threads.
        on_progress: called for every window and block, forwards and backwards.
        partial: where the record is kept, so that it is measured once; None = it is not.
        room: bytes of activations that may be kept in memory; the others lie in files.

    Returns:
        The job with the plan that was chosen, and the record of the choice for the report.

    Raises:
        ConfigError: the smallest forms exceed the target, or the model is within it as it is.
        NonFiniteError: an activation, gradient or weight is not finite.
        CheckpointError: the record cannot be read or written.
    """
    units = make_units(job)
    record: dict[str, Any] | None = None if partial is None else partial.read_note(_NOTE)
    if record is None:
        _check_budget(job, units)
        windows = calibration.windows[:NUM_WINDOWS]
        with _folder(partial) as folder:
            store = RowsStore(folder, [len(window) for window in windows], room=room)
            options = _measure(job, units, windows, workers, store, on_progress)
        result = allocate(options, _budget(job, units))
        record = _record(job, units, options, result, windows)
        if partial is not None:
            partial.write_note(_NOTE, record)
    chosen = {unit.name: unit.scheme(record["units"][unit.name]["chosen"]) for unit in units}
    plan = _plan(job.plan, units, chosen)
    if all(target.scheme is None for target in plan.targets):
        raise ConfigError(
            "nothing to quantize: the size asked for leaves every module as it is; ask for less"
        )
    return replace(job, plan=plan), record


@contextmanager
def _folder(partial: PartialDirectory | None) -> Iterator[Path]:
    """Return where files of a pass may lie."""
    if partial is not None:
        yield partial.path
        return
    with TemporaryDirectory(prefix="qinfer-") as folder:
        yield Path(folder)


def _measure(
    job: Job,
    units: Sequence[Unit],
    windows: Sequence[Sequence[int]],
    workers: Workers,
    store: RowsStore,
    on_progress: OnProgress,
) -> dict[str, list[Choice]]:
    """Return what every form of every unit costs and is expected to drift."""
    total, done = 2 * job.model.num_layers * len(windows), itertools.count(1)
    run = SensitivityRun(
        job,
        windows,
        workers,
        store,
        damp_percent=job.config.damp_percent,
        on_step=lambda: on_progress(QuantProgress("sensitivity", next(done), total)),
    )
    options: dict[str, list[Choice]] = {}
    with closing(store):
        for layer, sensitivities in run.layers():
            for unit in units:
                if unit.name.startswith(f"{block_name(layer)}."):
                    options[unit.name] = _options(job, unit, sensitivities, workers)
    return options


def make_units(job: Job) -> list[Unit]:
    """Group the modules that no override names, each group with the forms that fit it.

    Raises:
        ConfigError: there are none.
    """
    free = [
        t for t in job.plan.targets if not any(o.matches(t.name) for o, _ in job.plan.overrides)
    ]
    groups: dict[str, list[Target]] = {}
    for target in free:
        groups.setdefault(_unit_name(target.name), []).append(target)
    units = [
        Unit(name, tuple(targets), tuple(_fitting(job, targets)))
        for name, targets in groups.items()
    ]
    if not units:
        raise ConfigError("target_bits and target_size: overrides leave no module to choose for")
    return units


def _unit_name(module: str) -> str:
    """Return the unit of a module, such as `model.layers.0.qkv`."""
    layer, last = ".".join(module.split(".")[:3]), module.rpartition(".")[2]
    return f"{layer}.{'experts' if '.experts.' in module else _KINDS.get(last, last)}"


def _fitting(job: Job, targets: Sequence[Target]) -> Iterator[WeightScheme | None]:
    """Yield the forms that the format can carry for all of these modules."""
    for bits, group_size in FORMS:
        scheme = replace(job.plan.scheme, bits=bits, group_size=group_size)
        if not any(job.plan.form.misfit(t.in_features, t.out_features, scheme) for t in targets):
            yield scheme
    yield None


def _options(
    job: Job, unit: Unit, sensitivities: Mapping[str, LinearSensitivity], workers: Workers
) -> list[Choice]:
    drifts = torch.zeros(len(unit.schemes), dtype=torch.float64)
    for target in unit.targets:
        known = sensitivities.get(".".join(target.name.split(".")[3:]))
        if known is None:
            continue  # an expert that no token went through
        weight = job.source.tensor(f"{target.name}.weight")

        def drift(
            scheme: WeightScheme | None,
            known: LinearSensitivity = known,
            weight: torch.Tensor = weight,
            name: str = target.name,
        ) -> float:
            return 0.0 if scheme is None else known.drift(weight, scheme, name=name)

        drifts += torch.tensor(workers.map(drift, unit.schemes), dtype=torch.float64)
    return [
        Choice(_label(scheme), sum(_cost(job, t, scheme) for t in unit.targets), float(value))
        for scheme, value in zip(unit.schemes, drifts, strict=True)
    ]


def _cost(job: Job, target: Target, scheme: WeightScheme | None) -> int:
    """Return what a module costs: bytes of the checkpoint, or bits of codes, scales and zeros."""
    if job.config.target_size is not None:
        return replace(target, scheme=scheme).file_bytes(job.element_bytes)
    if scheme is None:
        return 8 * target.dense_bytes(job.element_bytes)
    groups = scheme.num_groups(target.in_features) * target.out_features
    zeros = 0 if scheme.symmetric else scheme.bits
    return target.in_features * target.out_features * scheme.bits + groups * (_SCALE_BITS + zeros)


def _budget(job: Job, units: Sequence[Unit]) -> int:
    """Return the target less what is not to be chosen, in the unit of `_cost`."""
    if job.config.target_size is not None:
        chosen = [target for unit in units for target in unit.targets]
        now = sum(target.file_bytes(job.element_bytes) for target in chosen)
        return job.config.target_size - (job.planned_bytes() - now)
    target_bits = job.config.target_bits or 0.0
    weights = sum(target.in_features * target.out_features for target in job.plan.targets)
    return int(target_bits * weights) - sum(_cost(job, t, t.scheme) for t in _settled(job, units))


def _check_budget(job: Job, units: Sequence[Unit]) -> None:
    """Refuse what even the smallest forms exceed, before anything is measured."""
    least = sum(
        min(sum(_cost(job, target, scheme) for target in unit.targets) for scheme in unit.schemes)
        for unit in units
    )
    over = least - _budget(job, units)
    if over <= 0:
        return
    if job.config.target_size is not None:
        asked, needed = f"target_size {job.config.target_size}", f"{job.config.target_size + over}"
    else:
        weights = sum(t.in_features * t.out_features for t in job.plan.targets)
        bits = job.config.target_bits or 0.0
        asked, needed = (
            f"target_bits {bits:g}",
            f"{math.ceil(1000 * (bits + over / weights)) / 1000}",
        )
    raise ConfigError(
        f"{asked} is too small: in the smallest forms that fit them the modules need {needed}; ask "
        "for that much, or change overrides and format"
    )


def _settled(job: Job, units: Sequence[Unit]) -> list[Target]:
    """Return the modules that are not to be chosen for: an override names them."""
    free = {target.name for unit in units for target in unit.targets}
    return [target for target in job.plan.targets if target.name not in free]


def _plan(plan: Plan, units: Sequence[Unit], chosen: Mapping[str, WeightScheme | None]) -> Plan:
    schemes = {target.name: chosen[unit.name] for unit in units for target in unit.targets}

    def settled(target: Target) -> Target:
        if target.name not in schemes:
            return target
        scheme = schemes[target.name]
        return replace(target, scheme=scheme, reason=None if scheme else ALLOCATED)

    rules = [
        (Override(unit.pattern), chosen[unit.name])
        for unit in units
        if chosen[unit.name] != plan.scheme
    ]
    targets = tuple(settled(target) for target in plan.targets)
    return replace(plan, targets=targets, overrides=(*plan.overrides, *rules))


def _record(
    job: Job,
    units: Sequence[Unit],
    options: Mapping[str, Sequence[Choice]],
    result: Allocation,
    windows: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Return what stays with the checkpoint: what was chosen, and what it is expected to cost."""
    weights = sum(t.in_features * t.out_features for t in job.plan.targets)
    in_bytes = job.config.target_size is not None
    cost = result.cost + sum(_cost(job, target, target.scheme) for target in _settled(job, units))
    return {
        "target": {"bytes": job.config.target_size}
        if in_bytes
        else {"bits": job.config.target_bits},
        "mean_bits": (8 if in_bytes else 1) * cost / weights,
        "expected_kld": result.drift,
        "least_possible_kld": result.bound,
        "windows": len(windows),
        "tokens": sum(len(window) for window in windows),
        "units": {
            unit.name: {
                "chosen": options[unit.name][result.chosen[unit.name]].label,
                "expected_kld": {c.label: c.drift for c in options[unit.name]},
            }
            for unit in units
        },
    }


def _label(scheme: WeightScheme | None) -> str:
    return "unquantized" if scheme is None else str(scheme)
