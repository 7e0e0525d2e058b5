"""What the record says about the machine and about the qinfer that was measured."""

import os
import platform
import subprocess
from pathlib import Path

from qinfer import __version__

# What decides the speed of quantized kernels.
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "asimddp")


def describe_machine() -> dict[str, str]:
    """Return model, cores, features, memory and software of this machine."""
    entries = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        entries.setdefault(name.strip(), value.strip())
    flags = (entries.get("flags") or entries.get("Features") or "").split()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": entries.get("model name", platform.processor()),
        "cores": str(len(os.sched_getaffinity(0))),
        "features": " ".join(name for name in FEATURES if name in flags),
        "cache": _last_cache() or entries.get("cache size", "unknown"),
        "memory": f"{memory / 1024**3:.0f} GiB",
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _last_cache() -> str:
    """Return the size of the cache next to the memory, or nothing."""
    folders = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    if not folders:
        return ""
    level, size = ((folders[-1] / name).read_text().strip() for name in ("level", "size"))
    return f"{size} L{level}"


def describe_qinfer(root: Path) -> dict[str, str]:
    """Return the version, and the commit if this is a checkout."""
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "qinfer")
    return {
        "version": __version__,
        "commit": (commit or "unknown") + (" with changes" if changed else ""),
    }


def _git(root: Path, *command: str) -> str:
    run = subprocess.run(
        ["git", "-C", str(root), *command], capture_output=True, text=True, check=False
    )
    return run.stdout.strip()
