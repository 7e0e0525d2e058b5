"""What the machine offers this process: CPU cores and memory, inside containers too. Torch-free.

Everything is read from `/proc` and `/sys` below `root`, so that tests can bring their own; where
these do not exist (macOS), portable calls of the standard library answer.
"""

import math
import os
import resource
import sys
from pathlib import Path

_NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number for "no limit"


def num_cores(root: Path = Path("/")) -> int:
    """Return the physical CPU cores that this process may use, at least 1.

    Respects the affinity mask and the CPU quota of the control group; hyper-threads of one core
    count once, since they share its vector units.
    """
    if sys.platform == "linux":
        cpus = sorted(os.sched_getaffinity(0))
    else:
        cpus = list(range(os.cpu_count() or 1))
    cores = len({_siblings(root, cpu) for cpu in cpus})
    quota = _cpu_quota(root)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still take: of the machine and of its cgroup."""
    candidates = [_machine_memory(root, "MemAvailable")]
    for limit, usage, reclaimable in _memory_limits(root):
        candidates.append(limit - usage + reclaimable)
    return max(0, min(candidates))


def total_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process may have at most: of the machine and of its cgroup."""
    limits = [limit for limit, _, _ in _memory_limits(root)]
    return min([_machine_memory(root, "MemTotal"), *limits])


def peak_rss(root: Path = Path("/")) -> int:
    """Return the largest resident size in bytes that this process ever had.

    On Linux from `VmHWM`: `ru_maxrss` survives `exec`, so a child that was started from a large
    process would report its parent's size.
    """
    for line in (_read(root / "proc/self/status") or "").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _siblings(root: Path, cpu: int) -> str:
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return _read(path) or str(cpu)


def _cpu_quota(root: Path) -> float | None:
    """Return the cores' worth of CPU time that the control groups allow; None = no limit."""
    quotas = []
    for group in _groups(root, ""):
        quota, _, period = (_read(group / "cpu.max") or "max 1").partition(" ")
        if quota != "max":
            quotas.append(int(quota) / int(period))
    for group in _groups(root, "cpu"):
        quota_us = int(_read(group / "cpu.cfs_quota_us") or -1)
        if quota_us > 0:
            quotas.append(quota_us / int(_read(group / "cpu.cfs_period_us") or 100_000))
    return min(quotas, default=None)


def _machine_memory(root: Path, entry: str) -> int:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        if line.startswith(f"{entry}:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_limits(root: Path) -> list[tuple[int, int, int]]:
    """Return (limit, usage, reclaimable page cache) of every control group above the process."""
    found = []
    for group in _groups(root, ""):
        limit = _read(group / "memory.max")
        if limit is not None and limit != "max":
            usage = int(_read(group / "memory.current") or 0)
            found.append((int(limit), usage, _stat(group, "inactive_file")))
    for group in _groups(root, "memory"):
        limit = _read(group / "memory.limit_in_bytes")
        if limit is not None and int(limit) < _NO_LIMIT:
            usage = int(_read(group / "memory.usage_in_bytes") or 0)
            found.append((int(limit), usage, _stat(group, "total_inactive_file")))
    return found


def _groups(root: Path, controller: str) -> list[Path]:
    """Return the process's control group and its ancestors; controller "" = the v2 hierarchy.

    Inside a container the path in /proc may lie outside what is mounted; then the mount's own
    root, which is always in the list, is the container's group.
    """
    mount = root / "sys/fs/cgroup" / controller
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = mount / path.lstrip("/")
            return [own, *(parent for parent in own.parents if parent.is_relative_to(mount))]
    return [mount]


def _stat(group: Path, key: str) -> int:
    for line in (_read(group / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
