"""The arena of weights: alignment, bounds, lifetime, huge pages and the fall back from them."""

import gc
import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qinfer.errors import CapacityError, ConfigError
from qinfer.kernels.cpu import arena
from qinfer.kernels.cpu.arena import Arena, aligned, huge_page_bytes, release_freed


def mapped_bytes(address: int) -> int:
    """Return the size of the mapping that holds an address, 0 if there is none."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return end - begin
    return 0


def mapping_start(mappings: str, address: int) -> int:
    """Return where the mapping that holds an address begins in the text of smaps."""
    for head in re.finditer(r"^([0-9a-f]+)-([0-9a-f]+) ", mappings, re.MULTILINE):
        if int(head[1], 16) <= address < int(head[2], 16):
            return head.start()
    raise AssertionError(f"nothing is mapped at {address:x}")


def resident_bytes() -> int:
    """Return the anonymous memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def test_tensors_are_aligned_zeroed_and_apart() -> None:
    shapes = [((3, 5), torch.int8), ((7,), torch.float32), ((2, 3, 4), torch.bfloat16)]
    sizes = [15, 28, 48]
    memory = Arena(sum(aligned(size) for size in sizes))
    tensors = [memory.take(shape, dtype) for shape, dtype in shapes]
    assert memory.free_bytes == 0
    for tensor, (shape, dtype) in zip(tensors, shapes, strict=True):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.data_ptr() % arena.ALIGNMENT == 0
        assert not tensor.any()
    for value, tensor in enumerate(tensors):
        tensor.fill_(value + 1)
    for value, tensor in enumerate(tensors):
        assert (tensor == value + 1).all()


def test_the_first_tensor_begins_a_huge_page() -> None:
    assert Arena(100).take((100,), torch.int8).data_ptr() % arena.HUGE_PAGE_BYTES == 0


def test_an_arena_gives_no_more_than_it_has() -> None:
    memory = Arena(128)
    memory.take((100,), torch.int8)
    assert memory.free_bytes == 0
    with pytest.raises(CapacityError, match="0 left"):
        memory.take((1,), torch.int8)
    assert memory.take((0, 4), torch.float32).shape == (0, 4)
    with pytest.raises(CapacityError, match="with 64 left"):
        Arena(64).take((17,), torch.float32)


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError):
        Arena(-1)
    with pytest.raises(CapacityError, match="refuses"):
        Arena(1 << 60)
    assert Arena(0).free_bytes == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_mapping_lives_as_long_as_a_tensor_and_goes_as_one() -> None:
    size = 8 << 20
    memory = Arena(size)
    first, second = memory.take((16,), torch.int8), memory.take((16,), torch.int8)
    address = first.data_ptr()
    assert mapped_bytes(address) >= size
    del memory, first
    gc.collect()
    assert mapped_bytes(address) >= size
    assert second.sum() == 0
    del second
    gc.collect()
    assert mapped_bytes(address) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has the advice")
def test_huge_pages_are_asked_for_and_counted() -> None:
    tensor = Arena(4 << 20).take((4 << 20,), torch.uint8)
    tensor.fill_(1)
    address = tensor.data_ptr()
    mappings = Path("/proc/self/smaps").read_text(encoding="utf-8")
    flags = mappings[mapping_start(mappings, address) :].split("VmFlags:")[1].splitlines()[0]
    if "hg" not in flags.split():
        pytest.skip("this kernel was built without huge pages")
    size = mapped_bytes(address)
    counted = huge_page_bytes([address, address + 5])
    assert counted is not None
    assert 0 <= counted <= size
    assert huge_page_bytes([]) == 0


def test_without_huge_pages_the_arena_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)  # as on a kernel that does not know it
    assert Arena(64).take((16,), torch.float32).sum() == 0


def test_a_system_that_tells_nothing_of_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert huge_page_bytes([1]) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_is_given_back() -> None:
    kept = [torch.ones(1 << 14) for _ in range(2000)]  # 64 KiB each: below what malloc maps alone
    full = resident_bytes()
    last = kept[-1]
    del kept
    release_freed()
    assert full - resident_bytes() > 100 << 20
    assert last.sum() == 1 << 14


RETURNED = """
import os
import sys
from pathlib import Path
import torch
from qinfer.kernels.cpu.arena import return_freed

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if len(sys.argv) > 1:
    return_freed(int(sys.argv[1]))
torch.ones(30 << 18)  # from then on glibc keeps what is freed and smaller
kept, dropped = [], []
for _ in range(100):
    dropped.append(torch.ones(2 << 18))  # 2 MiB
    kept.append(torch.ones(25 << 10))  # behind it, so that it is no end of the heap
full = resident()
del dropped
print((full - resident()) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
@pytest.mark.parametrize(("arguments", "least", "most"), [((), 0, 50), (("1048576",), 190, 210)])
def test_freed_tensors_go_back_at_once(arguments: tuple[str, ...], least: int, most: int) -> None:
    """In a process of its own, as it stays like that: 200 MiB between tensors that are kept."""
    command = [sys.executable, "-c", RETURNED, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert least <= int(result.stdout) <= most
