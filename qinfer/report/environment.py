"""What a measurement ran on: versions and machine. Torch-free."""

import datetime as dt
import platform
from importlib.metadata import version
from pathlib import Path

from qinfer import __version__
from qinfer.report.record import Environment

_CPU_INFO = Path("/proc/cpuinfo")


def describe(*, device: str, threads: int) -> Environment:
    """Return the environment of a measurement that ends now.

    Args:
        device: where the model ran.
        threads: CPU threads that it used.
    """
    return Environment(
        qinfer=__version__,
        torch=version("torch"),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cpu=cpu_name(),
        device=device,
        threads=threads,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    )


def cpu_name(cpu_info: Path = _CPU_INFO) -> str:
    """Return the processor's name, or its architecture where the system does not tell."""
    try:
        lines = cpu_info.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
