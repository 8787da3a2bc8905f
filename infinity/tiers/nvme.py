"""The nvme tier: one anonymous file per rank, or one striped over several drives, reserved at start and accessed by the
native I/O engine.

Transfers use host memory directly. Device memory that the host cannot address goes through pinned staging buffers, two
in flight, on threads of the tier's own.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch

from infinity.errors import ChecksumError
from infinity.native import _aio
from infinity.plan.placement import Extent
from infinity.plan.pools import STAGING_BYTES, staging_pool
from infinity.tiers.base import Tier, Window
from infinity.tiers.device import Device
from infinity.tiers.files import SwapFile
from infinity.tiers.io import register
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.transfer import Failed, Transfer, run_on


class _Request:
    """A native request. Keeps the tensor whose memory it uses alive until it has ended."""

    def __init__(self, request: _aio.Request, memory: torch.Tensor, extent: Extent) -> None:
        self._request = request
        self._memory: torch.Tensor | None = memory
        self._extent = extent

    def wait(self) -> None:
        try:
            self._request.wait()
        except OSError as error:
            # The native error adds nothing to this one.
            raise _with_name(error, self._extent, mismatch=self._request.mismatch) from None
        finally:
            if self._request.done():  # it continues if Ctrl-C ends the wait
                self._memory = None

    def done(self) -> bool:
        return self._request.done()


def _with_name(error: OSError, extent: Extent, *, mismatch: bool) -> OSError:
    """Return the error of a request with the name of its extent. mismatch: the bytes differ from those written."""
    if not mismatch:
        return OSError(error.errno, f"{error.strerror} ({extent.name})", error.filename)
    where = str(error.strerror).removeprefix(f"{os.strerror(errno.EBADMSG)}: ")
    text = (
        f"checksum mismatch in the {extent.name}, in {error.filename}: {where}. The drive or its cable is failing: "
        "resume from the last checkpoint on another drive"
    )
    return ChecksumError(errno.EBADMSG, text, str(error.filename))


class NvmeTier(Tier):
    """Extents of `file`. Each transfer raises its own OSError with path, offset, size and the name of the extent.

    checksum_block: bytes of a block whose checksum is kept and verified at every read (`placement.checksum_block`); 0:
    no checksums.
    """

    name = "nvme"
    on_device = False

    def __init__(
        self, file: SwapFile, nbytes: int, engine: _aio.Engine, device: Device, checksum_block: int = 0
    ) -> None:
        if checksum_block:
            file.file.keep_checksums(file.nbytes, checksum_block)
        self.nbytes = nbytes
        self._file = file
        self._engine = engine
        self._device = device
        self._reader: ThreadPoolExecutor | None = None
        self._writer: ThreadPoolExecutor | None = None
        if not device.host_addressable:
            # A thread each, so that a queue of writes does not delay a fetch, and a read has the drive to itself.
            self._reader, self._writer = (
                ThreadPoolExecutor(1, thread_name_prefix=f"infinity-{name}", initializer=device.enter_thread)
                for name in ("staging-reads", "staging-writes")
            )
            self._staging = Pool(self._staging_buffer, staging_pool().sizes, name="staging")
            self.staging_nbytes = self._staging.nbytes

    def _staging_buffer(self, nbytes: int) -> torch.Tensor:
        memory = self._device.host_buffer(nbytes)
        self.register(memory)
        return memory

    @property
    def bytes_read(self) -> int:
        return self._engine.bytes_read

    @property
    def bytes_written(self) -> int:
        return self._engine.bytes_written

    def read(self, extent: Extent, destination: torch.Tensor, offset: int = 0) -> Transfer:
        if self._reader is None or self._device.is_host(destination):
            return self._read(extent, destination, offset)
        return run_on(self._reader, self._staged_read, extent, destination, offset, self._device.compute_reached())

    def write(self, extent: Extent, source: torch.Tensor, offset: int = 0) -> Transfer:
        if self._writer is None or self._device.is_host(source):
            return self._write(extent, source, offset)
        return run_on(self._writer, self._staged_write, extent, source, offset, self._device.compute_reached())

    def window(self, extent: Extent, offset: int, nbytes: int, pool: Pool) -> Window | None:
        lease = pool.try_lease(nbytes)
        if lease is None:
            return None
        memory = lease.tensor
        arrived: Transfer
        try:
            arrived = self._read(extent, memory, offset)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits, as the error of a read that fails later
            arrived = Failed(error)
        return Window(memory, arrived, extent, offset, lease)

    def store(self, window: Window) -> Transfer:
        return self._write(window.extent, window.tensor, window.offset)

    def register(self, memory: torch.Tensor) -> None:
        register(self._engine, memory)

    def close(self) -> None:
        for executor in (self._reader, self._writer):
            if executor is not None:
                executor.shutdown()
        self._engine.close()
        self._file.close()

    def _read(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        request = self._engine.read(self._file.file, extent.offset + offset, memory.data_ptr(), memory.numel())
        return _Request(request, memory, extent)

    def _write(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        request = self._engine.write(self._file.file, extent.offset + offset, memory.data_ptr(), memory.numel())
        return _Request(request, memory, extent)

    def _staged_read(self, extent: Extent, destination: torch.Tensor, offset: int, after: Transfer) -> None:
        reading: deque[tuple[Transfer, Lease, torch.Tensor]] = deque()
        try:
            for piece, position in _pieces(destination):
                if len(reading) == 2:
                    self._land(*reading.popleft(), after)
                with self._staging.lease(piece.numel()) as lease:
                    transfer = self._read(extent, lease.tensor, offset + position)
                    reading.append((transfer, lease.detach(), piece))
            while reading:
                self._land(*reading.popleft(), after)
        finally:
            for transfer, lease, _ in reading:
                _settle(transfer, lease)

    def _land(self, transfer: Transfer, lease: Lease, piece: torch.Tensor, after: Transfer) -> None:
        with lease:
            transfer.wait()
            self._device.copy(piece, lease.tensor, after=after).wait()

    def _staged_write(self, extent: Extent, source: torch.Tensor, offset: int, after: Transfer) -> None:
        writing: deque[tuple[Transfer, Lease]] = deque()
        try:
            for piece, position in _pieces(source):
                if len(writing) == 2:
                    _finish(*writing.popleft())
                with self._staging.lease(piece.numel()) as lease:
                    self._device.copy(lease.tensor, piece, after=after).wait()
                    transfer = self._write(extent, lease.tensor, offset + position)
                    writing.append((transfer, lease.detach()))
            while writing:
                _finish(*writing.popleft())
        finally:
            for transfer, lease in writing:
                _settle(transfer, lease)


def _finish(transfer: Transfer, lease: Lease) -> None:
    """Wait until the kernel has released the buffer, then return it to its pool."""
    with lease:
        transfer.wait()


def _settle(transfer: Transfer, lease: Lease) -> None:
    """Finish a transfer and ignore its OSError, since an earlier one propagates."""
    with contextlib.suppress(OSError):
        _finish(transfer, lease)


def _pieces(tensor: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    starts = range(0, tensor.numel(), STAGING_BYTES)
    return [(tensor[start : start + STAGING_BYTES], start) for start in starts]
