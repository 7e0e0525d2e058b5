"""`--target-bits` and `--target-size`: bits and group size per module, from what each one costs.

Modules that run as one product (q, k and v; gate and up; all experts of a layer) share a form, so
that they stay fused here and in other engines.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qinfer.errors import ConfigError
from qinfer.formats.gptq import misfit
from qinfer.quant.allocate import Allocation, Choice, allocate
from qinfer.quant.config import Override
from qinfer.quant.job import Job, block_name
from qinfer.quant.sensitivity import LinearSensitivity, SensitivityRun
from qinfer.quant.targets import Plan, Target
from qinfer.quant.workers import Workers
from qinfer.schemes import WeightScheme

NUM_WINDOWS = 8  # of the calibration text; gradients cost three times what activations do
FORMS = (
    (2, 32), (2, 64), (3, 32), (3, 64), (3, 128), (4, 32), (4, 64), (4, 128), (8, 64), (8, None),
)  # fmt: skip
_SCALE_BITS = 16
_KINDS = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up",
    "w1": "gate_up", "w3": "gate_up", "w2": "down_proj",
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


def allocated(
    job: Job,
    windows: Sequence[Sequence[int]],
    workers: Workers,
    *,
    on_step: Callable[[int, int], None],
) -> tuple[Plan, dict[str, Any]]:
    """Choose bits and group sizes so that the model fits the size asked for and drifts least.

    Args:
        job: with `target_bits` or `target_size`; modules that an override names keep what it says.
        windows: calibration windows; the first `NUM_WINDOWS` are used.
        workers: the threads.
        on_step: called with the steps done and their number.

    Returns:
        The plan, and the record of the choice for the report.

    Raises:
        ConfigError: the smallest forms exceed the target.
        NonFiniteError: an activation, gradient or weight is not finite.
    """
    units = make_units(job)
    used = windows[:NUM_WINDOWS]
    steps = _Steps(on_step, 2 * job.model.num_layers * len(used))
    run = SensitivityRun(
        job, used, workers, damp_percent=job.config.damp_percent, on_step=steps.step
    )
    options: dict[str, list[Choice]] = {}
    for layer, sensitivities in run.layers():
        prefix = block_name(layer) + "."
        for unit in units:
            if unit.name.startswith(prefix):
                options[unit.name] = _options(job, unit, sensitivities, workers)
    result = allocate(options, _budget(job, units))
    return _plan(job.plan, units, result), _record(job, units, options, result, used)


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
        last = target.name.rpartition(".")[2]
        layer = ".".join(target.name.split(".")[:3])
        groups.setdefault(f"{layer}.{_KINDS.get(last, last)}", []).append(target)
    units = [
        Unit(name, tuple(targets), tuple(_fitting(job, targets)))
        for name, targets in groups.items()
    ]
    if not units:
        raise ConfigError("target_bits and target_size: overrides leave no module to choose for")
    return units


def _fitting(job: Job, targets: Sequence[Target]) -> Iterator[WeightScheme | None]:
    """Yield the forms that the format can carry for all of these modules."""
    for bits, group_size in FORMS:
        scheme = replace(job.plan.scheme, bits=bits, group_size=group_size)
        if not any(misfit(t.in_features, t.out_features, scheme) for t in targets):
            yield scheme
    yield None


def _options(
    job: Job, unit: Unit, sensitivities: Mapping[str, LinearSensitivity], workers: Workers
) -> list[Choice]:
    drifts = torch.zeros(len(unit.schemes), dtype=torch.float64)
    for target in unit.targets:
        weight = job.source.tensor(f"{target.name}.weight").float()
        known = sensitivities.get(".".join(target.name.split(".")[3:]))
        if known is None:
            continue  # an expert that no token went through

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
    free = {target.name for unit in units for target in unit.targets}
    rest = [target for target in job.plan.targets if target.name not in free]
    if job.config.target_size is not None:
        chosen = [target for unit in units for target in unit.targets]
        now = sum(target.file_bytes(job.element_bytes) for target in chosen)
        return job.config.target_size - (job.planned_bytes() - now)
    target_bits = job.config.target_bits or 0.0
    weights = sum(target.in_features * target.out_features for target in job.plan.targets)
    return int(target_bits * weights) - sum(_cost(job, t, t.scheme) for t in rest)


def _plan(plan: Plan, units: Sequence[Unit], result: Allocation) -> Plan:
    schemes = {
        target.name: unit.schemes[result.chosen[unit.name]]
        for unit in units
        for target in unit.targets
    }
    targets = [
        replace(
            t, scheme=schemes[t.name], reason=None if schemes[t.name] else "chosen by the target"
        )
        if t.name in schemes
        else t
        for t in plan.targets
    ]
    rules = [
        (Override(unit.pattern), unit.schemes[result.chosen[unit.name]])
        for unit in units
        if unit.schemes[result.chosen[unit.name]] != plan.scheme
    ]
    return replace(plan, targets=tuple(targets), overrides=(*plan.overrides, *rules))


def _record(
    job: Job,
    units: Sequence[Unit],
    options: Mapping[str, Sequence[Choice]],
    result: Allocation,
    windows: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Return what stays with the checkpoint: what was chosen, and what it is expected to cost."""
    weights = sum(t.in_features * t.out_features for unit in units for t in unit.targets)
    in_bytes = job.config.target_size is not None
    return {
        "target": {"bytes": job.config.target_size}
        if in_bytes
        else {"bits": job.config.target_bits},
        "mean_bits": (8 if in_bytes else 1) * result.cost / weights,
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


class _Steps:
    """Counts steps, from any thread."""

    def __init__(self, report: Callable[[int, int], None], total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def step(self) -> None:
        """One more is done."""
        self._done += 1
        self._report(self._done, self._total)
