"""No argument makes an entry point of the C++ library crash: see `support.native_fuzz`."""

import subprocess
import sys
from pathlib import Path

import pytest
import support.native_fuzz

from qinfer.kernels.cpu import native
from qinfer.kernels.cpu.program import OpKind


@pytest.mark.skipif(native.load() is None, reason="the C++ library was not built")
def test_nonsense_gets_a_status() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "support.native_fuzz", str(native.require().path), "25"],
        cwd=Path(support.native_fuzz.__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-4000:]}"


def test_every_op_is_fuzzed() -> None:
    assert set(support.native_fuzz.OPS) == set(OpKind)
