"""The nvme tier: one anonymous file per rank, or one striped over several drives, reserved at start and accessed by the
native I/O engine.

Transfers use host memory directly. Device memory that the host cannot address goes through pinned host buffers
(`infinity.tiers.staging`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from functools import cached_property, partial
from types import MappingProxyType

import torch

from infinity import concurrency
from infinity.errors import ChecksumError
from infinity.native import _aio
from infinity.observe.log import logger
from infinity.plan.placement import Extent, aligned
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier, Window
from infinity.tiers.device import Device
from infinity.tiers.files import SwapFile
from infinity.tiers.io import register
from infinity.tiers.pool import Pool
from infinity.tiers.read_ahead import WindowsAhead
from infinity.tiers.spares import Spares
from infinity.tiers.staging import Staging
from infinity.tiers.transfer import Failed, Transfer, run_on


class Request:
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
            # The kernel may use the memory until then.
            if self._request.done():  # it continues if Ctrl-C ends the wait
                self._memory = None
                _warn_of_repairs(self._request, self._extent)

    def done(self) -> bool:
        return self._request.done()


def _warn_of_repairs(request: _aio.Request, extent: Extent) -> None:
    for offset, nbytes, path, count in request.take_repaired():
        logger.warning(
            "checksum mismatch in the %s, in %s: %d bytes at offset %d were wrong, and right when they were read "
            "again, so they are used. %d such blocks so far: check the drive's cable, its controller and the memory",
            extent.name,
            path,
            nbytes,
            offset,
            count,
        )


def _with_name(error: OSError, extent: Extent, *, mismatch: bool) -> OSError:
    """Return the error of a request with the name of its extent. mismatch: the bytes differ from those written."""
    if not mismatch:
        return OSError(error.errno, f"{error.strerror} ({extent.name})", error.filename)
    where = str(error.strerror).removeprefix(f"{os.strerror(errno.EBADMSG)}: ")
    text = (
        f"checksum mismatch in the {extent.name}, in {error.filename}: {where}. The hardware is failing: "
        "resume from the last checkpoint on another drive or machine"
    )
    return ChecksumError(errno.EBADMSG, text, str(error.filename))


class NvmeTier(Tier):
    """Extents of `file`. Each transfer raises its own OSError with path, offset, size and the name of the extent.

    checksum_block: bytes of a block whose checksum is kept and verified at every read (`placement.checksum_block`); 0:
    no checksums.
    """

    kind = TierKind.NVME

    def __init__(
        self,
        file: SwapFile,
        nbytes: int,
        engine: _aio.Engine,
        device: Device,
        checksum_block: int = 0,
        ahead: Mapping[int, int] | None = None,
        spares: Mapping[Extent, Extent] = MappingProxyType({}),
    ) -> None:
        """ahead: bytes → number of host buffers for reads ahead, for a device that the host cannot address. spares: as
        of `Spares`.
        """
        if checksum_block:
            file.file.keep_checksums(file.nbytes, checksum_block)
        self.nbytes = nbytes
        self._file = file
        self._engine = engine
        self._device = device
        self._spares = Spares(spares)
        self._windows = WindowsAhead(self._open)
        self._staging: Staging | None = None
        if not device.host_addressable:
            self._staging = Staging(device, self._staging_buffer, self._read, self._write, ahead or {})
            self.staging_nbytes = self._staging.nbytes
            self.reads_ahead = bool(ahead)

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

    @property
    def blocks_repaired(self) -> int:
        """Blocks that did not match their checksum when they were read, and did in a second read."""
        return self._file.file.repaired

    def read(self, extent: Extent, destination: torch.Tensor, offset: int = 0) -> Transfer:
        if self._staging is None or self._device.is_host(destination):
            return self._read(extent, destination, offset)
        return self._staging.read(extent, destination, offset)

    def fetch(self, extent: Extent, destination: torch.Tensor) -> Transfer:
        code = extent.code
        if code is None:
            return self.read(extent, destination)
        stored = code.stored_in(destination)
        if self._staging is not None:
            return self._staging.read(extent, stored, 0, partial(self._device.decode, code, destination))
        return run_on(self._decoder, self._device.decode, code, destination, self._read(extent, stored, 0))

    @cached_property
    def _decoder(self) -> Executor:
        """The thread that decodes what has been read, so that the model's thread waits for neither."""
        return concurrency.one_thread("infinity-decoding", self._device.enter_thread)

    def write(self, extent: Extent, source: torch.Tensor, offset: int = 0) -> Transfer:
        # First: a window with the old bytes must not be taken after the write [Note: states read ahead].
        self._windows.forget(extent, offset, source.numel())
        if self._staging is None:
            return self._write(extent, source, offset)
        # Also for a source in host memory, which bypasses staging: host buffers may hold the old bytes.
        self._staging.ahead.forget(extent)
        if self._device.is_host(source):
            return self._write(extent, source, offset)
        return self._staging.write(extent, source, offset)

    def read_ahead(self, extents: Iterable[Extent]) -> None:
        if self._staging is not None:
            self._staging.read_ahead(extents)

    def window(self, extent: Extent, offset: int, nbytes: int, pool: Pool) -> Window | None:
        window = self._windows.take(extent, offset, nbytes) or self._open(extent, offset, nbytes, pool)
        # Windows ahead hold buffers of the same pool: without this, an update in another order would wait forever.
        while window is None and self._windows.give_up(pool):
            window = self._open(extent, offset, nbytes, pool)
        return window

    def window_ahead(self, extent: Extent, offset: int, nbytes: int, pool: Pool) -> bool:
        return self._windows.open(extent, offset, nbytes, pool)

    def drop_windows_ahead(self) -> None:
        self._windows.drop_all()

    def _open(self, extent: Extent, offset: int, nbytes: int, pool: Pool) -> Window | None:
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
        self._windows.forget(window.extent, window.offset, window.tensor.numel())
        return self._write(window.extent, window.tensor, window.offset)

    def begin_draft(self, extent: Extent) -> bool:
        return self._spares.begin(extent)

    def end_draft(self, extent: Extent, *, keep: bool) -> None:
        self._spares.end(extent, keep=keep)
        if keep:
            self._forget_ahead(extent)

    def _forget_ahead(self, extent: Extent) -> None:
        """Drop what was read ahead of an extent, whose present bytes are now in the other slot."""
        self._windows.forget(extent, 0, extent.nbytes)
        if self._staging is not None:
            self._staging.ahead.forget(extent)

    def release_space(self, extent: Extent) -> bool:
        """Give an extent's space back until `reserve_space`. Returns False if the file system keeps it."""
        return self._file.release(extent.offset, aligned(extent.nbytes))

    def reserve_space(self, extent: Extent) -> None:
        """Reserve the space of an extent again. Raises OutOfSpaceError if too little is free."""
        self._file.reserve(extent.offset, aligned(extent.nbytes))

    def register(self, memory: torch.Tensor) -> None:
        register(self._engine, memory)

    def close(self) -> None:
        # Staging submits requests and windows wait for theirs: both end before the engine and the descriptors.
        if self._staging is not None:
            self._staging.close()
        self._windows.drop_all()
        if "_decoder" in vars(self):
            self._decoder.shutdown()
        self._engine.close()
        self._file.close()

    def _read(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        return self._read_at(self._spares.to_read(extent) + offset, memory, extent)

    def _write(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        return self._write_at(self._spares.to_write(extent) + offset, memory, extent)

    def _read_at(self, place: int, memory: torch.Tensor, extent: Extent) -> Transfer:
        """Start to read at byte `place` of the file. extent: for messages."""
        request = self._engine.read(self._file.file, place, memory.data_ptr(), memory.numel())
        self._device.recorder.request("nvme_read", extent.name, memory.numel(), request)
        return Request(request, memory, extent)

    def _write_at(self, place: int, memory: torch.Tensor, extent: Extent, file: _aio.File | None = None) -> Transfer:
        """Start to write at byte `place`. file: another handle of the tier's file."""
        request = self._engine.write(file or self._file.file, place, memory.data_ptr(), memory.numel())
        self._device.recorder.request("nvme_write", extent.name, memory.numel(), request)
        return Request(request, memory, extent)
