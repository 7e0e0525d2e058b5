"""What the machine can do at most: the functions of peaks.c, on as many threads as the kernels."""

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROUNDS = 4_000_000  # some milliseconds, long against what starting a thread takes


class Peaks:
    """Arithmetic on registers only, and plain reads.

    Args:
        threads: that measure at once.
    """

    def __init__(self, threads: int) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise SystemExit("measuring the peaks needs a C compiler")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "peaks.so"
            source = Path(__file__).with_name("peaks.c")
            options = ["-O2", "-march=native", "-shared", "-fPIC", "-o", str(library)]
            subprocess.run([compiler, *options, str(source)], check=True)
            self._handle = ctypes.CDLL(str(library))
        self._arithmetic = {
            "exact": self._handle.peak_fma,
            "bf16": self._handle.peak_bf16,
            "int8": self._handle.peak_int8,
        }
        for function in self._arithmetic.values():
            function.argtypes = (ctypes.c_int64,)
            function.restype = ctypes.c_double
        self._handle.read_all.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def arithmetic(self, activations: str) -> float:
        """Return operations per second: `vpdpbusd` for int8, `vdpbf16ps` for bf16, else FMA."""
        function = self._arithmetic[activations]
        operations = function(1) * ROUNDS * self._threads
        return operations / self._seconds(lambda _: function(ROUNDS))

    def read(self, address: int, num_bytes: int) -> float:
        """Return bytes per second."""
        part = num_bytes // self._threads // 256 * 256
        elapsed = self._seconds(lambda i: self._handle.read_all(address + i * part, part))
        return part * self._threads / elapsed

    def _seconds(self, call: Callable[[int], object]) -> float:
        def measure() -> None:
            others = (
                [self._pool.submit(call, i) for i in range(1, self._threads)] if self._pool else []
            )
            call(0)
            for other in others:
                other.result()

        return seconds(measure, self._threads)


def seconds(call: Callable[[], object], threads: int) -> float:
    """Return what a call takes; of one thread its own time, which neighbours disturb least."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    start = clock()
    call()
    return clock() - start
