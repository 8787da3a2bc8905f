"""Moves storages that autograd saved to a room, and back before backward needs them.

A storage leaves only when nothing but saved tensors refers to it. So no code can edit it any more, and what the user or
the model keeps in memory is not copied in vain. Those saved first leave first, since backward uses them last; it takes
them in the reverse order, so they come back in this order, ahead of their use. Any other order costs waits, not values.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

import torch

from infinity import concurrency
from infinity.activations.room import Alias, Leftover, Room, Stored, key_of
from infinity.errors import UsageError
from infinity.plan.io import ActivationPlan
from infinity.tiers.device import Device
from infinity.tiers.freed import return_freed_memory
from infinity.tiers.transfer import Transfer

_SMALLEST_WINDOW = 64 << 20
_LARGEST_TENSORS = 8
"""Storages of the largest size in memory by default: about those of two transformer blocks."""
_SWEEPS = 16
"""A sweep for storages that can leave follows each 1/`_SWEEPS` of the window."""


class SavedActivation:
    """A saved tensor. Its storage may leave memory until `restore`."""

    __slots__ = ("_conj", "_dtype", "_neg", "_number", "_offset", "_size", "_store", "_stride", "stored")

    def __init__(self, tensor: torch.Tensor, stored: Stored, number: int, store: ActivationStore) -> None:
        self.stored = stored
        self._store = store
        self._number = number
        self._dtype = tensor.dtype
        self._offset, self._size, self._stride = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._conj, self._neg = tensor.is_conj(), tensor.is_neg()
        stored.aliases[number] = Alias(tensor.detach(), tensor._version)

    def restore(self) -> torch.Tensor:
        """Return the tensor. Raises LifetimeError if it was edited in place since it was saved."""
        error = self.stored.edits.get(self._number)
        if error is not None:
            raise error
        alias = self.stored.aliases.get(self._number)
        if alias is not None:
            alias.check()
        self._store.use(self.stored, in_memory=alias is not None)
        return self._view() if alias is None else alias.tensor

    def _view(self) -> torch.Tensor:
        memory = self.stored.memory
        assert memory is not None
        whole = memory[: memory.numel() // self._dtype.itemsize * self._dtype.itemsize].view(self._dtype)
        found = whole.as_strided(self._size, self._stride, self._offset)
        if self._conj:
            found = found.conj()
        return torch._neg_view(found) if self._neg else found

    def __del__(self) -> None:
        self.stored.aliases.pop(self._number, None)


class ActivationStore:
    """Saved tensors of one engine, in memory and in `room`. Thread-safe."""

    def __init__(self, room: Room, device: Device, plan: ActivationPlan) -> None:
        self.room = room
        self._device = device
        self._plan = plan
        self._access = concurrency.lock()
        self._closed = False
        self._largest = 0
        """Bytes of the largest storage so far."""
        self._unswept = 0
        """Bytes saved since the last sweep."""
        self._moved = 0
        """Bytes that left or came back since freed memory was returned to the system."""
        self._saves = 0
        self._numbers: list[int] = []
        """Numbers of all storages, ascending, and some of storages that are gone."""
        self._all: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
        self._resident: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
        """`key_of` its memory → storage."""
        self._leaving: deque[weakref.ref[Stored]] = deque()
        """Storages that are being written, oldest first."""
        self._leftovers: deque[Leftover] = deque()

    def save(self, tensor: torch.Tensor) -> SavedActivation | None:
        """Return a reference from which the tensor can be restored; None if it stays in memory.

        It stays if its storage is small, on another device, or not torch's own memory, or if its type is a subclass.
        """
        if not self._takes(tensor) or self._closed:
            return None
        with self._access:
            stored = self._resident.get(key_of(tensor))
            if stored is None:
                stored = self._add(tensor)
            self._saves += 1
            saved = SavedActivation(tensor, stored, self._saves, self)
            self._release_leftovers()
            if self._unswept * _SWEEPS >= self._window:
                self._unswept = 0
                self._sweep()
            return saved

    def use(self, stored: Stored, *, in_memory: bool) -> None:
        """Bring a storage to memory, and start reading those that backward uses next.

        in_memory: it is there, and only the reads start.
        """
        with self._access:
            if self._closed and not in_memory:
                raise UsageError("a backward needs activations of an engine that is closed: call it before close()")
            if self._closed:
                return
            self._release_leftovers()
            if stored.memory is None:
                self._begin_read(stored)
            self._read_ahead(stored)
            if not in_memory:
                if not stored.leaves:
                    self._arrive(stored)
                stored.check()
            if self._resident_bytes() > self._window:
                self._sweep(after=stored)

    def close(self) -> None:
        """Wait for all transfers and release the room. Storages that are there are lost."""
        with self._access:
            self._closed = True
            for stored in list(self._all.values()):
                _end(stored.transfer)
                stored.extent = stored.transfer = None
            while self._leftovers:
                _end(self._leftovers.popleft().transfer)
            self.room.close()

    # -- with the lock held ------------------------------------------------------------------------------------------

    def _takes(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.is_quantized or tensor.is_nested:
            return False
        if tensor.device != self._device.torch_device or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        storage = tensor.untyped_storage()
        # Memory that is not torch's own, such as numpy's, can be edited without a tensor.
        return storage.nbytes() >= self._plan.min_bytes and storage.resizable()

    @property
    def _window(self) -> int:
        """Bytes of storages that may be in memory, half of them not on their way."""
        return self._plan.memory_bytes or max(_SMALLEST_WINDOW, _LARGEST_TENSORS * self._largest)

    def _add(self, tensor: torch.Tensor) -> Stored:
        number = self._saves
        stored = Stored(number, tensor, self._leftovers)
        if len(self._numbers) > 2 * len(self._all) + 64:
            self._numbers = sorted(self._all.keys())
        self._numbers.append(number)
        self._all[number] = stored
        self._resident[stored.key] = stored
        self._largest = max(self._largest, stored.nbytes)
        self._unswept += stored.nbytes
        return stored

    def _resident_bytes(self) -> int:
        return sum(stored.nbytes for stored in self._resident.values())

    def _sweep(self, after: Stored | None = None) -> None:
        """Let storages leave until the rest is half of the window, and wait while all in memory exceed the window.

        after: those saved after it, which backward has used, leave, the last first. Default: the oldest leave first.
        """
        idle: list[Stored] = []
        held = leaving = 0
        for stored in self._resident.values():
            if stored.transfer is not None:
                held += stored.nbytes
                leaving += stored.nbytes if stored.leaves else 0
            elif not stored.is_shared():
                held += stored.nbytes
                if after is None or stored.number > after.number:
                    idle.append(stored)
        idle.sort(key=lambda stored: stored.number, reverse=after is not None)
        for stored in idle:
            if held - leaving <= self._window // 2:
                break
            if stored.extent is not None:
                self._drop(stored)
                held -= stored.nbytes
            else:
                self._begin_write(stored)
                leaving += stored.nbytes
        while self._leaving and (held > self._window or self._has_left(self._leaving[0])):
            held -= self._finish_oldest()

    def _read_ahead(self, used: Stored) -> None:
        """Start reading the storages that were saved before `used`, last saved first, up to half of the window."""
        if len(self._resident) == len(self._all):
            return
        held = self._resident_bytes()
        for stored in self._before(used):
            if stored.memory is not None:
                continue
            held += stored.nbytes
            if held > self._window // 2:
                break
            self._begin_read(stored)

    def _before(self, used: Stored) -> Iterator[Stored]:
        """Yield the storages saved before `used`, the last one first."""
        for place in range(bisect_left(self._numbers, used.number) - 1, -1, -1):
            stored = self._all.get(self._numbers[place])
            if stored is not None:
                yield stored

    def _begin_write(self, stored: Stored) -> None:
        assert stored.memory is not None
        extent = self.room.reserve(stored.nbytes)
        try:
            # Another tensor of the same memory, with a version counter of its own, which copies change.
            stored.transfer = self.room.write(extent, stored.memory.data)
        except BaseException:
            self.room.free(extent)
            raise
        stored.extent, stored.leaves = extent, True
        self._leaving.append(weakref.ref(stored))

    def _begin_read(self, stored: Stored) -> None:
        assert stored.extent is not None
        memory = torch.empty(stored.nbytes, dtype=torch.uint8, device=self._device.torch_device)
        stored.transfer, stored.leaves = self.room.read(stored.extent, memory.data), False
        stored.hold(memory)
        self._resident[stored.key] = stored
        self._count(stored)

    def _arrive(self, stored: Stored) -> None:
        """Wait until a storage that is read is in memory. Raises the OSError of the read; another use repeats it."""
        if stored.transfer is None:
            return
        try:
            with self._device.recorder.wait("activations", "activations"):
                self._device.await_copy(stored.transfer)
        except BaseException:
            self._leftovers.append(Leftover(stored.transfer, stored.memory, None))
            del self._resident[stored.key]
            stored.memory = stored.transfer = None
            raise
        stored.transfer = None

    @staticmethod
    def _has_left(leaving: weakref.ref[Stored]) -> bool:
        stored = leaving()
        return stored is None or (stored.transfer is not None and stored.transfer.done())

    def _finish_oldest(self) -> int:
        """Wait for the oldest write, and free its memory unless backward uses it. Returns the bytes freed."""
        stored = self._leaving.popleft()()
        if stored is None:  # freed with its graph
            return 0
        assert stored.transfer is not None
        transfer, stored.transfer, stored.leaves = stored.transfer, None, False
        try:
            with self._device.recorder.wait("activations", "activations"):
                transfer.wait()
        except BaseException:
            extent, stored.extent = stored.extent, None
            assert extent is not None
            self._leftovers.append(Leftover(transfer, stored.memory, extent))
            raise
        if stored.is_shared():
            return 0
        self._drop(stored)
        return stored.nbytes

    def _drop(self, stored: Stored) -> None:
        del self._resident[stored.key]
        stored.drop()
        self._count(stored)

    def _count(self, moved: Stored) -> None:
        """Count a storage that moved. Returns freed heap memory to the system once in a window.

        Blocks of a few MiB come from the C library's heap, where small ones between them would keep their pages.
        """
        self._moved += moved.nbytes
        if self._moved >= self._window and self._device.torch_device.type == "cpu":
            self._moved = 0
            return_freed_memory()

    def _release_leftovers(self) -> None:
        for _ in range(len(self._leftovers)):
            leftover = self._leftovers.popleft()
            if leftover.transfer is not None and not leftover.transfer.done():
                self._leftovers.append(leftover)
            elif leftover.extent is not None:
                self.room.free(leftover.extent)


def _end(transfer: Transfer | None) -> None:
    """Wait for a transfer whose bytes nobody needs."""
    if transfer is not None:
        with contextlib.suppress(OSError):
            transfer.wait()
