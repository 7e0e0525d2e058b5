"""Every test of the engine ends with a look at the books of every scheduler that it made."""

from collections.abc import Iterator
from typing import Any

import pytest

from qinfer.engine.scheduler import Scheduler


@pytest.fixture(autouse=True)
def books_are_right(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[Scheduler] = []
    original = Scheduler.__init__

    def note(scheduler: Scheduler, *args: Any, **options: Any) -> None:
        original(scheduler, *args, **options)
        made.append(scheduler)

    monkeypatch.setattr(Scheduler, "__init__", note)
    yield
    for scheduler in made:
        scheduler.check_integrity()
        if not scheduler.has_unfinished:
            assert scheduler.blocks.num_used == 0
