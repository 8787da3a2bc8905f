"""Host memory reports its release, after which the kernel must not use its pages."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from infinity.plan.placement import Extent
from infinity.tier_kind import TierKind
from infinity.tiers import memory
from infinity.tiers.device import CpuDevice
from infinity.tiers.files import open_swap_files
from infinity.tiers.io import open_engine
from infinity.tiers.memory import before_unmapping, host_tensor
from infinity.tiers.nvme import NvmeTier

NBYTES = 4 << 20


def test_told_once_when_the_last_view_is_gone() -> None:
    told: list[str] = []
    memory = host_tensor(NBYTES)
    before_unmapping(memory, lambda: told.append("gone"))
    view = memory[10:20].view(torch.int16)
    del memory
    assert told == []
    del view
    assert told == ["gone"]


def test_told_while_it_is_still_mapped() -> None:
    """The report comes before the unmapping, after which the address may be reused."""
    seen: list[bool] = []
    memory = host_tensor(NBYTES)
    address = memory.data_ptr()

    def look() -> None:
        lines = Path("/proc/self/maps").read_text().splitlines()
        ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in lines]
        seen.append(any(low <= address < high for low, high in ranges))

    before_unmapping(memory, look)
    del memory
    assert seen == [True]


def test_empty_tensors_too() -> None:
    told: list[str] = []
    memory = host_tensor(0)
    before_unmapping(memory, lambda: told.append("gone"))
    del memory
    assert told == ["gone"]


def test_registered_buffers_come_and_go(tmp_path: Path) -> None:
    """New memory often gets the address of unmapped memory; reads must arrive in the new pages."""
    engine = open_engine(block_size=1 << 20, queue_depth=4, threads=1)
    tier = NvmeTier(open_swap_files([tmp_path], NBYTES, name="x"), NBYTES, engine, CpuDevice())
    extent = Extent(TierKind.NVME, 0, NBYTES, "test")
    addresses = set()
    for turn in range(6):
        memory = host_tensor(NBYTES)
        addresses.add(memory.data_ptr())
        tier.register(memory)
        memory.fill_(turn)
        tier.write(extent, memory).wait()
        memory.fill_(0xFF)
        tier.read(extent, memory).wait()
        assert bool((memory == turn).all())
        del memory
    assert len(addresses) < 6  # or nothing was tested
    tier.close()
    kept = host_tensor(NBYTES)
    tier.register(kept)  # too late to matter


def test_memory_that_cannot_be_pinned_is_used_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed registration is reported once, and its error is cleared, which the next kernel would raise."""
    cleared: list[bool] = []
    refusing = SimpleNamespace(cudaHostRegister=lambda address, nbytes, flags: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    monkeypatch.setattr(memory, "_clear_cuda_error", lambda: cleared.append(True))
    monkeypatch.setattr(memory, "_pin_refused", False)
    with pytest.warns(UserWarning, match=r"4,096 bytes of host memory could not be pinned \(CUDA error 2\)"):
        first = host_tensor(4096, pin=True)
    second = host_tensor(4096, pin=True)
    assert len(cleared) == 2
    assert host_tensor(0, pin=True).numel() == 0 and len(cleared) == 2, "nothing was registered"
    assert not first.any() and not second.any()


def test_ranges_are_registered_one_by_one_and_unregistered_with_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consecutive ranges share a registration, which no copy of a whole range crosses."""
    made: list[tuple[int, int]] = []
    ended: list[int] = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: made.append((address, nbytes)) or 0,
        cudaHostUnregister=ended.append,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(memory, "_LARGEST_REGISTRATION", 3 * 4096)
    slab = host_tensor(16 * 4096)
    start = slab.data_ptr()
    pages = [(0, 1), (2, 3), (3, 5), (5, 6), (10, 14)]
    memory.pin_ranges(slab, [(first * 4096, last * 4096) for first, last in pages])
    registered = [(start + first * 4096, (last - first) * 4096) for first, last in [(0, 1), (2, 5), (5, 6), (10, 14)]]
    assert made == registered
    del slab
    assert sorted(ended) == [address for address, _ in registered]


_FIXED_NOREPLACE = 0x100000


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_unmaps_nothing() -> None:
    """A child lacks the pages. It may map others at their address, which the tensor's end must leave alone."""
    tensors = [host_tensor(NBYTES)]
    address = tensors[0].data_ptr()
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED_NOREPLACE
    child = os.fork()
    if child == 0:
        try:
            there = libc.mmap(ctypes.c_void_p(address), NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
            own = (ctypes.c_char * 8).from_address(there)
            own[0] = b"7"
            tensors.clear()
            gc.collect()
            os._exit(0 if there == address and own[0] == b"7" else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
