"""Giving freed memory back."""

import platform

import pytest

from qinfer.quant.budget import resident_bytes
from qinfer.quant.heap import release_free_memory

GNU = platform.libc_ver()[0] == "glibc"


@pytest.mark.skipif(not GNU, reason="only the GNU C library gives freed memory back when asked")
def test_freed_memory_between_what_is_kept_goes_back() -> None:
    pieces = [bytearray(b"x") * 100_000 for _ in range(2000)]
    kept = pieces[::10]  # nothing is free at the end of the heap
    del pieces
    before = resident_bytes()
    release_free_memory()
    assert before - resident_bytes() > 100_000_000
    assert len(kept) == 200
