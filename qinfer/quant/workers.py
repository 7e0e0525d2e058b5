"""Threads that compute whole samples, each with torch on one thread.

A sample's bits then depend neither on how many threads there are nor on which one computed it.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

import torch

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Workers:
    """A pool of threads; use it in a `with` block, within which torch keeps to one thread each.

    Args:
        threads: how many; None = as many as torch would use.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._before = torch.get_num_threads()
        self.threads = threads or self._before
        self._pool = ThreadPoolExecutor(
            self.threads, thread_name_prefix="quantize", initializer=_one_thread
        )

    def __enter__(self) -> Self:
        """Keep torch to one thread in the caller's thread too."""
        _one_thread()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what is running, drop what is not, and give torch its threads back."""
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._before)

    @property
    def executor(self) -> Executor:
        """The pool, for functions that take one."""
        return self._pool

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        """Return the results in the order of the items; the first item's error is raised."""
        return list(self._pool.map(function, items))


def _one_thread() -> None:
    torch.set_num_threads(1)
