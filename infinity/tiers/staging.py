"""Transfers between the nvme tier and device memory that the host cannot address, through pinned host buffers.

A read has three stages, each with a depth of its own: the drive fills host buffers, ahead of free device buffers
(`ReadAhead`) or in pieces of a read under way, and copies to the device follow on its stream.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import torch

from infinity import concurrency
from infinity.plan.placement import Extent
from infinity.plan.pools import STAGED_READS, STAGED_WRITES, STAGING_BYTES
from infinity.tiers.device import Device
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.read_ahead import Piece, ReadAhead
from infinity.tiers.transfer import DONE, Transfer, run_on

Io: TypeAlias = Callable[[Extent, torch.Tensor, int], Transfer]
"""Starts a read or write of host memory: (extent, memory, byte offset in the extent)."""


class Staging:
    """Transfers of one tier, with a thread for reads and one for writes, so that neither delays the other."""

    def __init__(
        self, device: Device, make: Callable[[int], torch.Tensor], read: Io, write: Io, ahead: Mapping[int, int]
    ) -> None:
        """make: allocates a host buffer. read, write: of the tier. ahead: bytes → number of buffers for reads ahead."""
        self._device = device
        self._read, self._write = read, write
        self._reading = Pool(make, {STAGING_BYTES: STAGED_READS}, name="staged reads")
        self._writing = Pool(make, {STAGING_BYTES: STAGED_WRITES}, name="staged writes")
        self._reserved = Pool(make, ahead, name="reads ahead")
        self.ahead = ReadAhead(self._reserved, read)
        self._copying: deque[tuple[Transfer, Lease]] = deque()
        """Copies to the device, oldest first, and the buffers that they read."""
        self._access = concurrency.lock()
        self._reader, self._writer = (
            concurrency.one_thread(f"infinity-staging-{name}", device.enter_thread) for name in ("reads", "writes")
        )

    @property
    def nbytes(self) -> int:
        return self._reading.nbytes + self._writing.nbytes + self._reserved.nbytes

    def read(
        self,
        extent: Extent,
        destination: torch.Tensor,
        offset: int,
        then: Callable[[Transfer], Transfer] = lambda copied: copied,
    ) -> Transfer:
        """Fill device memory from an extent, after the compute that the calling thread issued so far.

        then: takes the last copy, and returns the transfer that continues it.
        """
        whole = offset == 0 and destination.numel() == extent.nbytes
        # Taken in the calling thread: a later call that wants other extents would drop them.
        pieces = self.ahead.take(extent) if whole else deque[Piece]()
        # Recorded here, because the thread of reads has a stream of its own [Note: order on a device].
        after = self._device.compute_reached()
        return run_on(self._reader, self._read_in, extent, destination, offset, after, pieces, then)

    def write(self, extent: Extent, source: torch.Tensor, offset: int) -> Transfer:
        """Write device memory to an extent, after the compute that the calling thread issued so far."""
        return run_on(self._writer, self._write_out, extent, source, offset, self._device.compute_reached())

    def read_ahead(self, extents: Iterable[Extent]) -> None:
        """See `Tier.read_ahead`."""
        self._release_copied()
        self.ahead.want(extents)

    def close(self) -> None:
        # The threads end first: they lease buffers and append copies until then.
        for executor in (self._reader, self._writer):
            executor.shutdown()
        self.ahead.close()
        while self._copying:
            self._release_oldest()
        for pool in (self._reading, self._writing, self._reserved):
            pool.dismiss()

    # -- the thread of reads -----------------------------------------------------------------------------------------

    def _read_in(
        self,
        extent: Extent,
        destination: torch.Tensor,
        offset: int,
        after: Transfer,
        ahead: deque[Piece],
        then: Callable[[Transfer], Transfer],
    ) -> Transfer:
        """Read the pieces that were not read ahead, and issue the copies of all. Returns `then` of the last copy."""
        coming = ahead
        targets = deque(_pieces(destination))
        rest = deque((position, piece.numel()) for piece, position in list(targets)[len(ahead) :])
        read_ahead = len(ahead)
        copied: Transfer = DONE
        try:
            for _ in range(STAGED_READS):
                self._begin(extent, offset, rest, coming)
            while coming:
                copied = self._land(coming.popleft(), targets.popleft()[0], after)
                if read_ahead:
                    read_ahead -= 1
                else:
                    self._begin(extent, offset, rest, coming)
            return then(copied)
        finally:
            # After an error: the drive may still write to the buffers of reads under way.
            for piece in coming:
                piece.abandon()

    def _begin(self, extent: Extent, offset: int, rest: deque[tuple[int, int]], coming: deque[Piece]) -> None:
        """Start reading the next piece of `rest`, if any: (position, bytes)."""
        if not rest:
            return
        position, nbytes = rest.popleft()
        lease = self._reading.try_lease(nbytes)
        while lease is None:  # fewer reads than buffers are under way, so copies hold one
            self._release_oldest()
            lease = self._reading.try_lease(nbytes)
        with lease:
            coming.append(Piece(self._read(extent, lease.tensor, offset + position), lease.detach()))

    def _land(self, piece: Piece, target: torch.Tensor, after: Transfer) -> Transfer:
        with piece.lease as lease:
            piece.arrived.wait()
            copy = self._device.copy(target, lease.tensor, after=after)
            # A copy that has ended needs no place in the queue: the end of the block frees its buffer.
            if copy.done():
                copy.wait()  # raises its error
                return copy
            with self._access:
                self._copying.append((copy, lease.detach()))
        return copy

    def _release_copied(self) -> None:
        """Release the buffers of copies that have ended."""
        with self._access:
            while self._copying and self._copying[0][0].done():
                self._copying.popleft()[1].release()

    def _release_oldest(self) -> None:
        with self._access:
            if not self._copying:  # the thread that reads ahead has released them since
                return
            copy, lease = self._copying.popleft()
        with lease:
            copy.wait()

    # -- the thread of writes ----------------------------------------------------------------------------------------

    def _write_out(self, extent: Extent, source: torch.Tensor, offset: int, after: Transfer) -> None:
        writing: deque[tuple[Transfer, Lease]] = deque()
        try:
            for piece, position in _pieces(source):
                # The pool has as many buffers, so the next lease would wait for one of these.
                if len(writing) == STAGED_WRITES:
                    _finish(*writing.popleft())
                with self._writing.lease(piece.numel()) as lease:
                    # The host hands the buffer to the kernel, which follows no stream: the bytes must be there.
                    self._device.copy(lease.tensor, piece, after=after).wait()
                    transfer = self._write(extent, lease.tensor, offset + position)
                    writing.append((transfer, lease.detach()))
            while writing:
                _finish(*writing.popleft())
        finally:
            for transfer, lease in writing:
                with contextlib.suppress(OSError):  # an earlier one propagates
                    _finish(transfer, lease)


def _finish(transfer: Transfer, lease: Lease) -> None:
    """Wait until the kernel has released the buffer, then return it to its pool."""
    with lease:
        transfer.wait()


def _pieces(tensor: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    starts = range(0, tensor.numel(), STAGING_BYTES)
    return [(tensor[start : start + STAGING_BYTES], start) for start in starts]
