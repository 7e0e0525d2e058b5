"""Choosing forms under a budget: against trying every choice there is."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.errors import ConfigError
from qinfer.quant.allocate import Choice, allocate

OPTIONS = st.lists(
    st.builds(Choice, st.just("x"), st.integers(1, 30), st.floats(0, 10)), min_size=1, max_size=4
)
UNITS = st.lists(OPTIONS, min_size=1, max_size=5).map(
    lambda units: {f"unit {i}": options for i, options in enumerate(units)}
)


def best_of_all(units: dict[str, list[Choice]], budget: int) -> float | None:
    """Return the least drift of any choice within the budget."""
    fitting = [
        sum(choice.drift for choice in choices)
        for choices in product(*units.values())
        if sum(choice.cost for choice in choices) <= budget
    ]
    return min(fitting, default=None)


@given(units=UNITS, budget=st.integers(1, 120))
def test_the_bound_holds_and_the_choice_is_within_one_step_of_it(
    units: dict[str, list[Choice]], budget: int
) -> None:
    best = best_of_all(units, budget)
    if best is None:
        with pytest.raises(ConfigError, match="smallest choice needs"):
            allocate(units, budget)
        return
    found = allocate(units, budget)
    chosen = [units[name][index] for name, index in found.chosen.items()]
    assert found.cost == sum(choice.cost for choice in chosen) <= budget
    assert found.drift == pytest.approx(sum(choice.drift for choice in chosen))
    assert found.bound <= best + 1e-9
    assert best <= found.drift + 1e-9
    largest = max(max(c.drift for c in u) - min(c.drift for c in u) for u in units.values())
    assert found.drift - found.bound <= largest + 1e-9


def test_a_large_budget_buys_the_best_of_everything() -> None:
    units = {
        "a": [Choice("int3", 3, 5.0), Choice("int4", 4, 1.0), Choice("int8", 8, 0.1)],
        "b": [Choice("int4", 4, 2.0), Choice("int3", 3, 9.0)],
    }
    found = allocate(units, 100)
    assert (found.chosen, found.cost, found.bound) == ({"a": 2, "b": 0}, 12, found.drift)


def test_bits_go_where_they_gain_most() -> None:
    """Two units of one size: the one that suffers ten times as much gets the bits."""
    sensitive = [Choice("int3", 3, 10.0), Choice("int4", 4, 3.0), Choice("int8", 8, 0.0)]
    robust = [Choice("int3", 3, 1.0), Choice("int4", 4, 0.3), Choice("int8", 8, 0.0)]
    found = allocate({"sensitive": sensitive, "robust": robust}, 11)
    assert found.chosen == {"sensitive": 2, "robust": 0}


def test_options_off_the_hull_are_left() -> None:
    """int4 with a large group that is no smaller, and one above the line between its neighbours."""
    unit = [Choice("a", 2, 10.0), Choice("no better", 3, 10.0), Choice("above", 5, 9.0),
            Choice("b", 6, 2.0)]  # fmt: skip
    assert allocate({"u": unit}, 5).chosen == {"u": 0}
    assert allocate({"u": unit}, 6).chosen == {"u": 3}
