"""The terminal: tables on stdout, progress and remarks on stderr.

Only this module decides how the command line looks; what is shown comes from the verbs.
"""

from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column, Table
from rich.text import Text

PIPE_WIDTH = 140  # columns where stdout is no terminal: a file or pipe has no width of its own

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def progress_bar(*, transient: bool = False) -> Progress:
    """Return a progress display on stderr: description, bar, m/n, elapsed time, remark.

    Descriptions and remarks give way on a narrow terminal, never the bar.

    Args:
        transient: remove the bars when the display ends.
    """
    console = err if err.is_terminal else Console(file=err.file, width=PIPE_WIDTH)
    bar_width = 24 if console.width >= 110 else 12
    room = max(console.width - bar_width - 20, 20)  # m/n, time and the spaces between take 20
    named = min(44, max(room * 2 // 3, 16))
    return Progress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=named)),
        BarColumn(bar_width=bar_width),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn(
            "[dim]{task.fields[note]}", table_column=Column(no_wrap=True, max_width=room - named)
        ),
        console=console,
        transient=transient,
    )


class Stages:
    """Progress bars by stage name: the first report of a stage adds its bar.

    A context manager, so that the terminal is restored whatever happens inside.
    """

    def __init__(self) -> None:
        self._progress = progress_bar()
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        """Start the display."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the display and leave the bars as they stand."""
        self._progress.stop()

    def update(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Show that `done` of `total` steps of `stage` are finished."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(Text(stage).markup, total=total, note="")
        self._progress.update(
            self._tasks[stage], completed=done, total=total, note=Text(note).markup
        )


def table(title: str | None, columns: list[str], rows: list[list[str]], *, left: int = 1) -> Table:
    """Return a plain table: the first `left` columns flush left, numbers flush right."""
    heading = None if title is None else Text(title)
    result = Table(title=heading, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        result.add_column(
            Text(name.replace(" ", "\n")),
            justify="left" if index < left else "right",
            vertical="bottom",
            overflow="fold",
            no_wrap=index >= left,
        )
    for row in rows:
        result.add_row(*[Text(cell) for cell in row])
    return result


def show_table(
    title: str | None, columns: list[str], rows: list[list[str]], *, left: int = 1
) -> None:
    """Print a table to stdout; one too wide for the terminal is cut into several.

    Each part repeats the first `left` columns, so that no figure is squeezed or dropped.
    """
    console = _stdout()
    first = left
    while first < len(columns):
        last = len(columns)
        part = _columns(title, columns, rows, [*range(left), *range(first, last)], left)
        while last > first + 1 and _natural_width(console, part) > console.width:
            last -= 1
            part = _columns(title, columns, rows, [*range(left), *range(first, last)], left)
        console.print(part)
        title, first = None, last


def show(item: Table | str) -> None:
    """Print a table, or text without markup, to stdout."""
    _stdout().print(Text(item) if isinstance(item, str) else item)


def remark(text: str) -> None:
    """Print a remark to stderr, so that stdout stays the result; one line where none is wrapped."""
    err.print(Text(text), style="dim", soft_wrap=not err.is_terminal)


def warn(text: str) -> None:
    """Print a warning to stderr."""
    err.print(Text(f"warning: {text}"), style="yellow", soft_wrap=not err.is_terminal)


def megabytes(num_bytes: int) -> str:
    """Return a size as it is shown: 1,234.5 MB."""
    return f"{num_bytes / 1e6:,.1f} MB"


def _stdout() -> Console:
    return out if out.is_terminal else Console(file=out.file, width=PIPE_WIDTH, highlight=False)


def _columns(
    title: str | None, columns: list[str], rows: list[list[str]], chosen: list[int], left: int
) -> Table:
    return table(
        title, [columns[i] for i in chosen], [[row[i] for i in chosen] for row in rows], left=left
    )


def _natural_width(console: Console, part: Table) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), part).maximum
