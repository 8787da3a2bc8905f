"""Page-aligned host memory of exact size, as torch tensors that own their storage.

torch's own pinned allocator rounds blocks up to powers of two (257 GB became 512 GB). These slabs are mapped at their
exact size and registered with CUDA if there is a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch

from infinity.errors import OutOfMemoryError, user_level
from infinity.native import _adam
from infinity.tiers.available import available_memory

PAGE = mmap.PAGESIZE
_SEGMENT = 64 << 20
_LARGEST_REGISTRATION = 64 << 30
"""Drivers of branch 580 refuse one registration of 512 GiB."""


def host_tensor(nbytes: int, *, pin: bool = False) -> torch.Tensor:
    """Return a zeroed uint8 tensor (nbytes,) whose storage is a mapping of its own, aligned to pages.

    pin: register it with CUDA. If that fails, warns once and continues unpinned. Raises OutOfMemoryError if the system
    refuses the mapping.
    """
    length = max(nbytes, 1)
    try:
        # A mapping of its own: munmap returns the bytes to the system at once, whatever else the heap holds.
        mapping = _Mapping(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        available = available_memory()
        hint = "lower infinity.unit_size, or infinity.memory.host if it keeps states in memory"
        if length <= available:
            hint = "see vm.overcommit_memory and vm.max_map_count (sysctl)"
        raise OutOfMemoryError("host memory", length, available, hint) from error
    # A child process must not share pages that the kernel is writing into (fork during direct reads).
    mapping.madvise(mmap.MADV_DONTFORK)
    _alive.add(mapping)
    if length >= 2 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: only speed is lost
            mapping.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=length)[:nbytes]
    _mappings[tensor.data_ptr()] = mapping
    if pin and nbytes:
        first_touch(tensor)  # otherwise registration would place all pages on this thread's node
        pin_ranges(tensor, [(0, length)])
    return tensor


def with_own_storage(memory: torch.Tensor) -> torch.Tensor:
    """Return a part of a host tensor, uint8 (n,), as a tensor whose storage is that part alone.

    It keeps the mapping.
    """
    start = memory.untyped_storage().data_ptr()
    # torch refuses a buffer of no bytes.
    if not memory.numel():
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(_mappings[start], dtype=torch.uint8, count=memory.numel(), offset=memory.data_ptr() - start)


def first_touch(tensor: torch.Tensor) -> None:
    """Zero fresh host memory, uint8 (n,), with as many threads as later update it.

    The kernel places a page on the NUMA node of the thread that first writes to it. Each segment is divided among the
    threads, so that each unit's states lie on all nodes, and its updates and copies have the bandwidth of all. (Tested
    only on machines with one node, where it saves time.)
    """
    for start in range(0, tensor.numel(), _SEGMENT):
        _adam.first_touch(tensor.data_ptr() + start, min(_SEGMENT, tensor.numel() - start))


class _Mapping(mmap.mmap):
    """Mapping that runs callbacks before it is unmapped; callbacks of weak references would run after."""

    users: tuple[Callable[[], None], ...] = ()

    def __del__(self) -> None:
        users, self.users = self.users, ()
        for let_go in users:
            let_go()


_mappings: weakref.WeakValueDictionary[int, _Mapping] = weakref.WeakValueDictionary()
"""address → mapping, for all live host tensors. The storage of its tensors keeps a mapping alive."""


_alive: weakref.WeakSet[_Mapping] = weakref.WeakSet()


def _keep_in_child() -> None:
    """Never unmap in a forked child: it lacks these pages, and may have mapped others at their addresses since."""
    for mapping in list(_alive):
        # A reference that nobody gives back, so that `__del__` never runs in the child.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_keep_in_child)


def before_unmapping(tensor: torch.Tensor, callback: Callable[[], None]) -> None:
    """Call `callback` just before the memory of `tensor`, from `host_tensor`, is unmapped."""
    mapping = _mappings[tensor.data_ptr()]
    mapping.users = (*mapping.users, callback)


_pin_refused = False


def pin_ranges(memory: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
    """Register bytes [start, stop) of `memory`, from `host_tensor`, with CUDA for as long as it is mapped.

    ranges: in ascending order, each from the start of a page. Consecutive ones are registered together, up to
    `_LARGEST_REGISTRATION`: no copy may cross registrations. If one fails, warns once, and the rest stays unpinned.
    """
    global _pin_refused
    cudart = torch.cuda.cudart()
    for start, stop in _joined(ranges):
        address = memory.data_ptr() + start
        result = int(cudart.cudaHostRegister(address, stop - start, 0))
        # Unregistered before the pages are unmapped: the driver would keep a stale entry for the addresses.
        if result == 0:
            before_unmapping(memory, partial(cudart.cudaHostUnregister, address))
            continue
        _clear_cuda_error()
        if not _pin_refused:
            _pin_refused = True
            warnings.warn(
                f"{stop - start:,} bytes of host memory could not be pinned (CUDA error {result}): copies to and from "
                "the GPU are slower and do not overlap. Free host memory, or set pin_memory of offload_param and "
                "offload_optimizer to false to pin no states.",
                stacklevel=user_level(),
            )
        return


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start and stop - joined[-1][0] <= _LARGEST_REGISTRATION:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def _clear_cuda_error() -> None:
    """Clear the error that a failed call of the CUDA runtime leaves; the next kernel launch would raise it."""
    try:
        name = f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}"
        runtime = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)  # the one that torch loaded: another has errors of its own
        runtime.cudaGetLastError()
    except OSError:  # torch links it statically: a launch raises and clears it
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device="cuda").zero_()


def storage_users(tensor: torch.Tensor) -> int:
    """Return the number of tensors, and of other references to the storage of `tensor`, itself included.

    A storage has one Python object, of which each `untyped_storage()` is a reference.
    """
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)
