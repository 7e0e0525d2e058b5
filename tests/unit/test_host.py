import os
import sys
from pathlib import Path

import pytest

from qinfer import host


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(root: Path, cgroup: str, **files: str) -> Path:
    meminfo = "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n"
    write(root, **{"proc/meminfo": meminfo, "proc/self/cgroup": cgroup, **files})
    return root


def test_memory_of_the_machine_without_limits(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", **{"sys/fs/cgroup/memory.max": "max\n"})
    assert host.available_memory(root) == 1000 * 1024
    assert host.total_memory(root) == 2000 * 1024


def test_memory_limit_of_the_group_v2(tmp_path: Path) -> None:
    """The page cache of the group can be reclaimed, so it counts as available."""
    root = machine(
        tmp_path,
        "0::/box/inner\n",
        **{
            "sys/fs/cgroup/box/memory.max": "500000",
            "sys/fs/cgroup/box/memory.current": "400000",
            "sys/fs/cgroup/box/memory.stat": "anon 1\ninactive_file 30000\n",
            "sys/fs/cgroup/box/inner/memory.max": "max",
        },
    )
    assert host.available_memory(root) == 130_000
    assert host.total_memory(root) == 500_000


def test_memory_limit_of_the_group_v1(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "3:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n",
        **{
            # Inside a container the group's own path is not mounted; the mount's root is it.
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "300000",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "100000",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 5000\n",
        },
    )
    assert host.available_memory(root) == 205_000
    assert host.total_memory(root) == 300_000


def test_no_limit_in_v1_is_a_huge_number(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096)}
    assert host.available_memory(machine(tmp_path, "3:memory:/\n", **files)) == 1000 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="affinity masks are a Linux affair")
def test_hyper_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu in os.sched_getaffinity(0):
        name = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        write(tmp_path, **{name: "0-1"})
    assert host.num_cores(tmp_path) == 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000"}, 1),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}, None),
    ],
)
def test_the_cpu_quota_limits_the_cores(tmp_path: Path, files, expected: int | None) -> None:
    root = machine(tmp_path, "0::/\n2:cpu,cpuacct:/\n", **files)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    assert host.num_cores(root) == (expected or cores)


def test_this_machine() -> None:
    assert host.num_cores() >= 1
    assert host.available_memory() > 1 << 20
    assert host.peak_rss() > 1 << 20
