"""Page-aligned host memory of exact size, as torch tensors that own their storage.

torch's own pinned allocator rounds blocks up to powers of two (257 GB became 512 GB); these slabs are mapped at their
exact size and, where there is a CUDA device, registered with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import warnings
import weakref
from collections.abc import Callable
from functools import partial

import torch

from infinity import _adam
from infinity.errors import OutOfMemoryError
from infinity.tiers.available import available_memory

PAGE = mmap.PAGESIZE
_SEGMENT = 64 << 20


def host_tensor(nbytes: int, *, pin: bool = False) -> torch.Tensor:
    """A zeroed uint8 tensor (nbytes,) whose storage is its own mapping, aligned to pages.

    Raises OutOfMemoryError when the system refuses the mapping. With `pin`, registers it with CUDA; where that fails
    (a small memlock limit), warns once and goes on unpinned.
    """
    length = max(nbytes, 1)
    try:
        mapping = _Mapping(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        hint = "lower infinity.unit_size or infinity.prefetch_bytes, or keep fewer states on cpu"
        raise OutOfMemoryError("host memory", length, available_memory(), hint) from error
    # A child process must not share pages that the kernel is writing into (fork during direct reads).
    mapping.madvise(mmap.MADV_DONTFORK)
    if length >= 2 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: only speed is lost
            mapping.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=length)[:nbytes]
    _mappings[tensor.data_ptr()] = mapping
    if pin:
        first_touch(tensor)  # registering it would put all of it on this thread's node
        _pin(tensor, length)
    return tensor


def first_touch(tensor: torch.Tensor) -> None:
    """Zero fresh host memory, uint8 (n,), with as many threads as update what will be kept there.

    The system puts a page on the memory node of the thread that first writes to it. Each segment is divided among the
    threads, so that where there are several nodes, every unit's states lie on all of them, and its updates and copies
    have the bandwidth of all. (Only machines with one node have run this; there it saves time.)
    """
    for start in range(0, tensor.numel(), _SEGMENT):
        _adam.first_touch(tensor.data_ptr() + start, min(_SEGMENT, tensor.numel() - start))


class _Mapping(mmap.mmap):
    """Tells those who gave its address away before its memory is given back; a weak reference would tell them after."""

    users: tuple[Callable[[], None], ...] = ()

    def __del__(self) -> None:
        users, self.users = self.users, ()
        for let_go in users:
            let_go()


_mappings: weakref.WeakValueDictionary[int, _Mapping] = weakref.WeakValueDictionary()
"""The mappings of all host tensors there are, by address; what keeps one is the storage of its tensors."""


def before_unmapping(tensor: torch.Tensor, callback: Callable[[], None]) -> None:
    """Call `callback` just before the memory of `tensor`, which `host_tensor` made, is given back to the system."""
    mapping = _mappings[tensor.data_ptr()]
    mapping.users = (*mapping.users, callback)


_pin_refused = False


def _pin(tensor: torch.Tensor, length: int) -> None:
    """Register the memory of `tensor` with CUDA for as long as it is mapped."""
    global _pin_refused
    cudart = torch.cuda.cudart()
    result = cudart.cudaHostRegister(tensor.data_ptr(), length, 0)
    if int(result) == 0:
        before_unmapping(tensor, partial(cudart.cudaHostUnregister, tensor.data_ptr()))
    elif not _pin_refused:
        _pin_refused = True
        warnings.warn(
            f"host memory could not be pinned (CUDA error {int(result)}; `ulimit -l` limits it): transfers to the "
            "GPU will be slower.",
            stacklevel=3,
        )


def storage_users(tensor: torch.Tensor) -> int:
    """How many tensors and wrappers refer to the storage of `tensor`, itself included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def return_freed_memory() -> None:
    """Give freed memory back to the system: the C library keeps what lies between blocks that are in use, which grows
    with the model where large blocks are freed among small ones that stay.
    """
    if _trim is not None:
        _trim(0)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
