"""Room on nvme: anonymous files that are added as they are needed, with the states' folders, stripes and checksums.

`open_activations` opens the room of saved activations that a plan names, here or in host memory.

Transfers go through page-aligned host buffers (`infinity.tiers.staging`) on every device, since tensors of torch are
not aligned to pages.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from contextlib import ExitStack

import torch

from infinity.activations.room import HostRoom, Room
from infinity.activations.store import ActivationStore
from infinity.errors import OutOfSpaceError
from infinity.native import _aio
from infinity.plan.io import ActivationPlan, IoPlan
from infinity.plan.placement import Extent, aligned
from infinity.tier_kind import TierKind
from infinity.tiers.device import Device
from infinity.tiers.files import SwapFile, alignment, check_folder, open_swap_files, warn_of_memory, whole
from infinity.tiers.io import engine_of, register
from infinity.tiers.nvme import Request
from infinity.tiers.staging import Staging
from infinity.tiers.transfer import Transfer


class Ranges:
    """Free ranges of [0, end), disjoint and never adjacent."""

    def __init__(self) -> None:
        self.end = 0
        self._stops: dict[int, int] = {}
        """Start → end of a free range."""

    def grow(self, nbytes: int) -> int:
        """Add `nbytes` at the end, which are not free yet. Returns where they start."""
        start, self.end = self.end, self.end + nbytes
        return start

    def take(self, nbytes: int) -> int | None:
        """Return the start of `nbytes` that were free: the first ones of the smallest range that holds them."""
        fitting = [(stop - start, start) for start, stop in self._stops.items() if stop - start >= nbytes]
        if not fitting:
            return None
        size, start = min(fitting)
        del self._stops[start]
        if size > nbytes:
            self._stops[start + nbytes] = start + size
        return start

    def free(self, start: int, nbytes: int, *, walls: tuple[int, int] | None = None) -> None:
        """Free bytes [start, start + nbytes). walls: range within which they join free neighbours; default: all."""
        stop = start + nbytes
        low, high = walls or (0, self.end)
        if stop < high:
            stop = self._stops.pop(stop, stop)
        before = next((first for first, last in self._stops.items() if last == start), None)
        if start > low and before is not None:
            del self._stops[before]
            start = before
        self._stops[start] = stop


NAME = "saved activations"
_SEGMENT = 256 << 20
"""Smallest bytes of a file, unless the disk has less room."""
_GROWTH = 2
"""A file has at least 1/`_GROWTH` of the bytes of those before, so that their number stays small."""


class DiskRoom:
    """Room in files of one rank. Space is reserved file by file, so a full disk is an error of `reserve`."""

    kind = TierKind.NVME

    def __init__(self, io: IoPlan, engine: _aio.Engine, device: Device, rank: int) -> None:
        """io: its `nbytes` is unused. engine: closed with the room, or after an error."""
        self._io = io
        self._name = f"{NAME} of rank {rank}"
        self._ranges = Ranges()
        self._files: list[SwapFile] = []
        self._starts: list[int] = []
        """First byte of each file."""
        self._engine = engine
        with ExitStack() as undo:
            undo.callback(self._engine.close)
            self._device = device
            self._staging = Staging(device, self._buffer, self._read, self._write, {})
            undo.pop_all()
        self.staging_nbytes = self._staging.nbytes

    @property
    def nbytes(self) -> int:
        return self._ranges.end

    @property
    def bytes_read(self) -> int:
        return self._engine.bytes_read

    @property
    def bytes_written(self) -> int:
        return self._engine.bytes_written

    @property
    def blocks_repaired(self) -> int:
        return sum(file.file.repaired for file in self._files)

    def reserve(self, nbytes: int) -> Extent:
        size = aligned(nbytes)
        start = self._ranges.take(size)
        if start is None:
            self._grow(size)
            start = self._ranges.take(size)
            assert start is not None
        return Extent(TierKind.NVME, start, nbytes, NAME)

    def free(self, extent: Extent) -> None:
        file = self._file_of(extent)
        first = self._starts[file]
        # An extent lies in one file, so free ranges of two files are never joined.
        walls = first, first + aligned(self._files[file].nbytes)
        self._ranges.free(extent.offset, aligned(extent.nbytes), walls=walls)

    def write(self, extent: Extent, source: torch.Tensor) -> Transfer:
        return self._staging.write(extent, source, 0)

    def read(self, extent: Extent, destination: torch.Tensor) -> Transfer:
        return self._staging.read(extent, destination, 0)

    def close(self) -> None:
        self._staging.close()
        self._engine.close()
        for file in self._files:
            file.close()

    def _grow(self, nbytes: int) -> None:
        """Add a file with room for an extent of `nbytes`, and for more if the disk has it."""
        wanted = max(nbytes, _SEGMENT, aligned(self._ranges.end // _GROWTH))
        try:
            try:
                file = self._open(wanted)
            except OutOfSpaceError:
                wanted = nbytes
                file = self._open(wanted)
        except OutOfSpaceError as error:
            hint = (
                f"saved activations take {self._ranges.end:,} bytes so far: free space there, set "
                "infinity.activations.nvme_path to a folder on a larger disk, or checkpoint the model's blocks "
                "(torch.utils.checkpoint) to save fewer"
            )
            raise OutOfSpaceError(error.where, error.needed, error.available, hint) from None
        start = self._ranges.grow(aligned(file.nbytes))
        self._files.append(file)
        self._starts.append(start)
        self._ranges.free(start, wanted, walls=(start, self._ranges.end))

    def _open(self, nbytes: int) -> SwapFile:
        chunk, weights = self._io.stripe.chunk, self._io.stripe.weights
        file = open_swap_files(self._io.folders, nbytes, name=self._name, chunk=chunk, weights=weights)
        if self._io.checksum_block:
            file.file.keep_checksums(file.nbytes, self._io.checksum_block)
        return file

    def _file_of(self, extent: Extent) -> int:
        return bisect_right(self._starts, extent.offset) - 1

    def _buffer(self, nbytes: int) -> torch.Tensor:
        memory = self._device.host_buffer(nbytes)
        register(self._engine, memory)
        return memory

    def _read(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        return self._recorded("read", self._engine.read(*self._pages(extent, memory, offset)), memory, extent)

    def _write(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        return self._recorded("write", self._engine.write(*self._pages(extent, memory, offset)), memory, extent)

    def _recorded(self, queue: str, request: _aio.Request, memory: torch.Tensor, extent: Extent) -> Transfer:
        name, queue = f"{queue} {NAME}", f"activations {queue}"
        self._device.recorder.request("activations", name, request.nbytes, request, queue)
        return Request(request, memory, extent)

    def _pages(self, extent: Extent, memory: torch.Tensor, offset: int) -> tuple[_aio.File, int, int, int]:
        """Return file, offset, address and bytes of a request for whole pages: other bytes pass through the page cache.

        memory: of a staging buffer, and the bytes after it, up to a page, are unused there and in the extent.
        """
        file = self._file_of(extent)
        start = extent.offset - self._starts[file] + offset
        return self._files[file].file, start, memory.data_ptr(), whole(memory.numel(), alignment())


def open_activations(plan: ActivationPlan | None, device: Device, rank: int) -> ActivationStore | None:
    """Return the store of saved activations; None without a plan. Raises StorageError for a folder that takes no
    file.
    """
    if plan is None:
        return None
    if plan.io is not None:
        for folder in plan.io.folders:
            check_folder(folder, "infinity.activations.nvme_path")
        if rank == 0:
            warn_of_memory(plan.io.folders)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first real file repeats them
            open_swap_files(plan.io.folders, 1, name=NAME).close()
    room: Room = HostRoom(device) if plan.io is None else DiskRoom(plan.io, engine_of(plan.io), device, rank)
    return ActivationStore(room, device, plan)
