"""How long work tells how far it is: stage, steps done, steps in all, a remark."""

from collections.abc import Callable

OnProgress = Callable[[str, int, int, str], None]


def ignore(stage: str, done: int, total: int, note: str) -> None:
    """Take progress and do nothing with it."""
