"""Which form each part of a model gets, so that all together fit a size and drift least.

A multiple-choice knapsack: of every unit one option is taken. Solved greedily over the options that
lie on each unit's convex hull (Sinha and Zoltners, "The multiple-choice knapsack problem",
Operations Research 27(3), 1979): what is found is optimal but for the one step that no longer fits,
and the linear relaxation bounds how far from the optimum it can be. Knows nothing of weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from qinfer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Choice:
    """One form that a unit can take.

    Args:
        label: what it is called in reports.
        cost: how large the unit is then.
        drift: how much the model then drifts because of this unit, in any measure; not negative.
    """

    label: str
    cost: int
    drift: float


@dataclass(frozen=True, slots=True)
class Allocation:
    """What was chosen.

    Args:
        chosen: per unit, the index of its option.
        cost: of all units together; at most the budget.
        drift: expected of all units together.
        bound: no choice within the budget has less drift than this.
    """

    chosen: dict[str, int]
    cost: int
    drift: float
    bound: float


def allocate(units: Mapping[str, Sequence[Choice]], budget: int) -> Allocation:
    """Choose one option per unit with the least total drift within a budget.

    Args:
        units: the options of every unit, in any order; at least one each.
        budget: largest total cost.

    Raises:
        ConfigError: even the smallest options exceed the budget; names what they need.
    """
    hulls = {name: _hull(options) for name, options in units.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    spent = sum(units[name][index].cost for name, index in chosen.items())
    if spent > budget:
        raise ConfigError(f"the smallest choice needs {spent}, more than the {budget} asked for")
    drift = sum(units[name][index].drift for name, index in chosen.items())
    bound, blocked = drift, False
    for step in _steps(units, hulls):
        if not blocked:
            # The linear relaxation takes steps whole until one no longer fits, and of that a part.
            part = min(1.0, (budget - spent) / step.cost)
            bound -= part * step.gain
            blocked = part < 1.0
        if chosen[step.unit] == step.before and spent + step.cost <= budget:
            chosen[step.unit] = step.after
            spent += step.cost
            drift -= step.gain
    drift = sum(units[name][index].drift for name, index in chosen.items())
    return Allocation(chosen, spent, drift, min(bound, drift))


@dataclass(frozen=True, slots=True)
class _Step:
    """From one option of a unit's hull to the next larger one."""

    unit: str
    before: int
    after: int
    cost: int
    gain: float


def _steps(
    units: Mapping[str, Sequence[Choice]], hulls: Mapping[str, Sequence[int]]
) -> list[_Step]:
    """Return the steps of all units, the one that gains most for its cost first.

    Along a convex hull the gain for the cost falls, so that a unit's steps come in their order.
    """
    steps = []
    for unit, hull in hulls.items():
        for before, after in pairwise(hull):
            small, large = units[unit][before], units[unit][after]
            steps.append(
                _Step(unit, before, after, large.cost - small.cost, small.drift - large.drift)
            )
    return sorted(steps, key=lambda step: -step.gain / step.cost)


def _hull(options: Sequence[Choice]) -> list[int]:
    """Return the options on the lower convex hull of drift over cost, by rising cost."""
    order = sorted(range(len(options)), key=lambda i: (options[i].cost, options[i].drift))
    hull: list[int] = []
    for index in order:
        if hull and options[index].drift >= options[hull[-1]].drift:
            continue  # as large as another or larger, and no better
        while len(hull) > 1 and not _turns(options[hull[-2]], options[hull[-1]], options[index]):
            hull.pop()
        hull.append(index)
    return hull


def _turns(first: Choice, middle: Choice, last: Choice) -> bool:
    """Tell whether the drift falls faster, for its cost, before the middle than behind it."""
    before = (first.drift - middle.drift) * (last.cost - middle.cost)
    behind = (middle.drift - last.drift) * (middle.cost - first.cost)
    return before > behind
