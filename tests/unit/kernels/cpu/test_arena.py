"""The arena of weights: alignment, bounds, lifetime, huge pages and the fall back from them."""

import gc
import mmap
import sys
from pathlib import Path

import pytest
import torch

from qinfer.errors import CapacityError, ConfigError
from qinfer.kernels.cpu import arena
from qinfer.kernels.cpu.arena import Arena, aligned, release_freed


def mapped_bytes(address: int) -> int:
    """Return the size of the mapping that holds an address, 0 if there is none."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return end - begin
    return 0


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


def test_without_huge_pages_the_arena_works_and_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = tmp_path / "enabled"
    monkeypatch.setattr(arena, "_SWITCH", switch)
    assert not Arena(64).huge_pages  # a system without the switch
    switch.write_text("always madvise [never]\n")
    memory = Arena(64)
    assert not memory.huge_pages
    assert memory.take((16,), torch.float32).sum() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has the advice")
def test_huge_pages_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    switch = tmp_path / "enabled"
    switch.write_text("always [madvise] never\n")
    monkeypatch.setattr(arena, "_SWITCH", switch)
    region = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pytest.skip("this kernel was built without huge pages")
    finally:
        region.close()
    assert Arena(4 << 20).huge_pages


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_is_given_back() -> None:
    kept = [torch.ones(1 << 14) for _ in range(2000)]  # 64 KiB each: below what malloc maps alone
    full = resident_bytes()
    last = kept[-1]
    del kept
    release_freed()
    assert full - resident_bytes() > 100 << 20
    assert last.sum() == 1 << 14
