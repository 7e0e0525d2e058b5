"""Numbers with their spread, and Markdown tables."""

import statistics
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]


def spread(values: Sequence[float]) -> str:
    """Return `median [lowest-highest]`; one number if there is one, nothing if there is none."""
    if not values:
        return ""
    low, middle, high = min(values), statistics.median(values), max(values)
    if len(values) == 1:
        return number(middle)
    return f"{number(middle)} [{number(low)}-{number(high)}]"


def number(value: float) -> str:
    """Return a number with three digits that count."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 20 else f"{value:.2f}"
