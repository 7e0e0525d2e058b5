"""Freed memory that the C library keeps."""

import contextlib
import ctypes


def release_free_memory() -> None:
    """Give the system back what the C library keeps of freed memory, where it can be asked to.

    Tokenizing a text or computing samples leaves hundreds of megabytes there, in pieces that large
    tensors cannot use.
    """
    with contextlib.suppress(AttributeError):  # only the GNU library has the function
        ctypes.CDLL(None).malloc_trim(0)
