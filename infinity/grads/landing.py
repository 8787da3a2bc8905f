"""Brings a reduced gradient to the memory where it is updated or stored, and adds it to the stored one.

A gradient that the host only stores leaves the device in one copy. The device sums its squares meanwhile, since the
host's threads update other units. One that is added or converted on the host leaves in pieces: while one is added and
summed, the next are copied. On memory tiers it is added in its extent; elsewhere in a buffer, which is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from infinity.comm.communicator import Communicator
from infinity.grads.buffers import GradBuffers, Piece, Sent, StoredPieces, cut
from infinity.grads.squares import DeviceSquares
from infinity.plan.layout import UnitLayout
from infinity.plan.pools import PIECE_BYTES
from infinity.sizes import sum_in_order
from infinity.tiers.pool import Lease
from infinity.tiers.transfer import DONE, Together, Transfer
from infinity.units.unit import Unit
from infinity.update.job import Gradient, Squares


class Landing:
    """The work of the gradients' thread, or of the model's thread for small units."""

    def __init__(self, ranks: Communicator, places: GradBuffers) -> None:
        self._ranks = ranks
        self._places = places
        self._stored: dict[int, torch.Tensor | None] = {}
        """unit → its stored shard on a tier of host memory; None on others."""
        self._sums: dict[int, DeviceSquares] = {}
        self._pieces: dict[tuple[int, int], Sequence[Piece]] = {}
        """(unit, bytes of an element) → pieces in which its shard leaves the device."""
        self._in_extent: dict[int, Gradient] = {}
        """unit → gradient that its update reads from its extent."""
        self._writing: dict[int, Future[None]] = {}
        """unit → last write of its extent."""
        self._sums_on_device = places.kernels.is_exact(places.device.torch_device.type)
        """True if the device's sums of squares have the host's bits."""

    def sums_each(self, unit: Unit) -> bool:
        """Return whether the squares of every stored gradient of a unit are summed, since that costs no pass of its
        own; else those of a step's last micro-batch.
        """
        return not self._places.on_device(unit) or self._places.stored_in_place(unit) is None

    def land(self, sent: Sent, slots: dict[int, set[int]], add: bool) -> Gradient:
        """Return the reduced shard in memory that the update can work in. slots: as of `Sent.await_issue`. add: plus
        the stored part.
        """
        sent.await_issue(slots)
        gradient, in_extent = self._arrive(sent, add=add, stays=False)
        if in_extent:
            self._in_extent[sent.unit.index] = gradient
        elif add:
            tier, extent = self._places.tier_of(sent.unit), self._places.extent_of(sent.unit)
            gradient.call_on_release(partial(tier.discard, extent))  # later than the device's read of the stored part
        return gradient

    def store(self, sent: Sent, *, add: bool) -> tuple[Gradient, Transfer]:
        """Store the reduced shard. add: plus the stored part. Returns it, and the transfer after which it is stored and
        has to be released.
        """
        gradient, in_extent = self._arrive(sent, add=add, stays=True)
        if in_extent:
            return gradient, gradient.reached
        try:
            extent = self._places.extent_of(sent.unit)
            return gradient, self._places.tier_of(sent.unit).write(extent, gradient.shard.view(torch.uint8))
        except BaseException:
            gradient.release()
            raise

    def read_by_update(self, unit: Unit, gradient: Gradient) -> Gradient:
        """Return the stored gradient for an update that reads it now."""
        read = gradient.share()
        if read.is_in_extent:
            self._in_extent[unit.index] = read
        return read

    def note_writing(self, unit: Unit, written: Future[None]) -> None:
        """Note the end of a write, before which the extent is neither read nor written."""
        self._writing[unit.index] = written

    def squares_of_stored(self, unit: Unit) -> Squares:
        """Return the sum of squares of the stored gradient, for a tier of the device."""
        stored = self._places.stored_in_place(unit)
        assert stored is not None
        return self._device_squares(unit).start(stored)

    def close(self) -> None:
        """Wait until nothing is copied to this object's memory, and refer to no memory of a tier."""
        for sums in self._sums.values():
            sums.close()
        self._stored.clear()
        self._in_extent.clear()

    # -- cases -------------------------------------------------------------------------------------------------------

    def _arrive(self, sent: Sent, *, add: bool, stays: bool) -> tuple[Gradient, bool]:
        """Return the gradient, and whether it is in its extent. stays: it has to be stored in its extent."""
        try:
            sent.keep_shard(self._ranks.shard(sent.flat))
            self._await_extent(sent.unit)
            # A gradient for an update now needs no extent, unless a part is there or its dtype changes.
            stored = None
            if stays or add or self._places.dtypes_of(sent.unit).stored != sent.flat.dtype:
                stored = self._stored_in_place(sent.unit)
            if self._places.on_device(sent.unit):
                gradient = self._arrive_on_device(sent, stored, add=add)
            elif stored is not None:
                gradient = self._arrive_in_extent(sent, stored, add=add)
            else:
                gradient = self._arrive_in_buffer(sent, add=add)
            return gradient, stored is not None
        except BaseException:
            sent.lease.release()
            raise
        finally:
            sent.forget()

    def _await_extent(self, unit: Unit) -> None:
        """Wait until nothing uses the unit's extent."""
        if self._writing and (writing := self._writing.pop(unit.index, None)) is not None:
            writing.exception()  # raised by the gradient that was written
        if self._in_extent and (reading := self._in_extent.pop(unit.index, None)) is not None:
            reading.wait_until_released()

    def _arrive_on_device(self, sent: Sent, stored: torch.Tensor | None, *, add: bool) -> Gradient:
        places, shard = self._places, sent.flat
        # The sum follows the reduction on this thread's stream; the host does not wait [Note: order on a device].
        places.device.await_copy(sent.reduced)
        if stored is not None:
            with places.device.recorder.span("reduce", sent.unit.name, shard.nbytes, places.device.stamp):
                if add:
                    stored.add_(shard)
                else:
                    stored.copy_(shard)
            shard = stored
        elif add:
            self._add_stored(sent.unit, shard)
        sums = sent.last or self.sums_each(sent.unit)
        squares = self._device_squares(sent.unit).start(shard) if sums else Squares(None)
        return Gradient(shard, sent.lease, squares, places.device.compute_reached())

    def _add_stored(self, unit: Unit, shard: torch.Tensor) -> None:
        """Add a stored gradient to `shard` in device memory, for a tier that allocates what it stores."""
        places = self._places
        assert places.stored_pool is not None and places.dtypes_of(unit).stored == shard.dtype
        with places.stored_pool.lease(shard.nbytes) as lease:
            places.device.await_copy(places.tier_of(unit).read(places.extent_of(unit), lease.tensor))
            shard.add_(lease.flat(shard.dtype))  # this thread's next read follows it

    def _arrive_in_extent(self, sent: Sent, stored: torch.Tensor, *, add: bool) -> Gradient:
        pool, shard, layout = self._places.host_pool, sent.flat, sent.unit.layout
        copied = not add and stored.dtype == shard.dtype
        if pool is None:
            self._places.device.await_copy(sent.reduced)
            # The squares were summed on arrival, so a plain copy is the only pass left.
            if copied and sent.squares is not None:
                stored.copy_(shard)
                squares = Squares(sent.squares)
            else:
                squares = Squares(self._receive(layout, stored, shard, _whole(shard), add=add))
        # Nothing is added, so the device copies to the extent without a buffer of the host.
        elif copied:
            squares = self._leave(sent, stored)
        else:
            with pool.lease(shard.nbytes) as host, self._leaving(sent, host.flat(shard.dtype)) as arriving:
                squares = Squares(self._receive(layout, stored, host.flat(shard.dtype), arriving, add=add))
        sent.lease.release()
        return Gradient(stored, None, squares, DONE)

    def _arrive_in_buffer(self, sent: Sent, *, add: bool) -> Gradient:
        pool, shard, lease = self._places.host_pool, sent.flat, None
        if pool is None:
            self._places.device.await_copy(sent.reduced)
            arrived = self._pieces_of(sent.unit, shard.itemsize) if add else _whole(shard)
            squares, lease = self._combine(sent, shard, arrived, add=add)
        else:
            with pool.lease(shard.nbytes) as host:
                there = host.flat(shard.dtype)
                if add or self._places.dtypes_of(sent.unit).stored != shard.dtype:
                    with self._leaving(sent, there) as arriving:
                        squares, lease = self._combine(sent, there, arriving, add=add)
                else:
                    squares = self._leave(sent, there)
                sent.move(host.detach(), there)
        if lease is not None:
            sent.move(lease, lease.flat(self._places.dtypes_of(sent.unit).stored))
        return Gradient(sent.flat, sent.lease, squares, DONE)

    def _combine(
        self, sent: Sent, shard: torch.Tensor, arriving: Iterable[Piece], *, add: bool
    ) -> tuple[Squares, Lease | None]:
        """Convert `shard`, in host memory, to the stored dtype, and add the stored part. Returns the sum of squares,
        and the buffer of the result; None: the result is in `shard`.
        """
        places, layout = self._places, sent.unit.layout
        dtype = places.dtypes_of(sent.unit).stored
        if dtype == shard.dtype:
            if add:
                return Squares(self._add_pieces(sent.unit, shard, arriving)), None
            known = sent.squares
            return Squares(self._receive(layout, shard, shard, arriving) if known is None else known), None
        assert places.stored_pool is not None
        with places.stored_pool.lease(shard.numel() * dtype.itemsize) as lease:
            if add:
                places.tier_of(sent.unit).read(places.extent_of(sent.unit), lease.tensor).wait()
            return Squares(self._receive(layout, lease.flat(dtype), shard, arriving, add=add)), lease.detach()

    def _add_pieces(self, unit: Unit, shard: torch.Tensor, arriving: Iterable[Piece]) -> float:
        """Add the stored part to `shard`, of its dtype, piece by piece. Returns the sum of squares."""
        places, pieces = self._places, self._pieces_of(unit, shard.itemsize)
        assert places.stored_pool is not None
        stored = StoredPieces(places.tier_of(unit), places.extent_of(unit), shard.dtype, pieces, places.stored_pool)
        with contextlib.closing(stored.along(arriving)) as arrived:
            return self._receive(unit.layout, shard, stored, arrived, add=True)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _leave(self, sent: Sent, host: torch.Tensor) -> Squares:
        """Copy the shard to `host`, of its dtype, and wait for the copy. Returns its sum of squares."""
        unit, device = sent.unit, self._places.device
        if not self._sums_on_device:
            with self._leaving(sent, host) as arriving:
                return Squares(self._receive(unit.layout, host, host, arriving))
        squares: Squares | None = None
        copy = device.copy(host.view(torch.uint8), sent.flat.view(torch.uint8), after=sent.reduced)
        try:
            device.await_copy(sent.reduced)
            with contextlib.suppress(torch.OutOfMemoryError):  # the model may have taken all of the device's memory
                squares = self._device_squares(unit).start(sent.flat)
        finally:  # the shard's buffer is used again
            Together(copy, device.compute_reached()).wait()
        if squares is None:
            return Squares(self._receive(unit.layout, host, host, _whole(host)))
        return squares

    @contextlib.contextmanager
    def _leaving(self, sent: Sent, host: torch.Tensor) -> Iterator[Iterator[Piece]]:
        """Copy the shard to `host` in pieces. Gives each once it has arrived; at the end of the block all have."""
        shard, device = sent.flat.view(torch.uint8), self._places.device
        memory, width = host.view(torch.uint8), host.itemsize
        # All copies are issued at once, so that the device is busy while the host adds the first [Note: how a gradient
        # lands in its tier].
        pieces = self._pieces_of(sent.unit, width)
        copies: list[Transfer] = []
        try:
            for start, stop in pieces:
                place = slice(start * width, stop * width)
                copies.append(device.copy(memory[place], shard[place], after=sent.reduced))
            yield _arrived(pieces, copies)
        finally:
            for copy in copies:
                with contextlib.suppress(Exception):  # raised in the block
                    copy.wait()

    def _receive(
        self,
        layout: UnitLayout,
        target: torch.Tensor,
        source: torch.Tensor | StoredPieces,
        arriving: Iterable[Piece],
        *,
        add: bool = False,
    ) -> float:
        """Copy `source` to `target`, or add it, in any dtypes, piece by piece, and zero padding. Returns the norm's
        part of the sum. `target` may be `source`.
        """
        parts, threads = layout.parts(self._ranks.shard_rank), self._places.threads
        kernels = self._places.kernels
        sums, number = [0.0] * len(parts), 0
        for start, stop in arriving:
            with self._places.device.recorder.span("reduce", layout.name, (stop - start) * source.itemsize):
                end = start
                while number < len(parts) and parts[number].start < stop:
                    part = parts[number]
                    low, high = max(part.start, start), min(part.stop, stop)
                    _zero(target, end, low)
                    into, initial = target[low:high], sums[number]
                    if target is source:
                        sums[number] = kernels.sum_of_squares(into, initial=initial, threads=threads)
                    else:
                        found = kernels.receive(into, source[low:high], add=add, initial=initial, threads=threads)
                        sums[number] = found
                    end = high
                    # The part goes on in the next piece, with the sum so far as its beginning.
                    if part.stop > stop:
                        break
                    number += 1
                _zero(target, end, stop)
        return sum_in_order(sums[k] / part.copies for k, part in enumerate(parts) if part.in_norm)

    def _stored_in_place(self, unit: Unit) -> torch.Tensor | None:
        """Return the view of the extent. Cached in host memory, which does not move."""
        # Memory of the device may move, so its views are not kept.
        if self._places.on_device(unit):
            return self._places.stored_in_place(unit)
        if unit.index not in self._stored:
            self._stored[unit.index] = self._places.stored_in_place(unit)
        return self._stored[unit.index]

    def _pieces_of(self, unit: Unit, itemsize: int) -> Sequence[Piece]:
        found = self._pieces.get((unit.index, itemsize))
        if found is None:
            parts = unit.layout.parts(self._ranks.shard_rank)
            found = cut(parts, unit.layout.shard_numel, PIECE_BYTES // itemsize)
            self._pieces[unit.index, itemsize] = found
        return found

    def _device_squares(self, unit: Unit) -> DeviceSquares:
        found = self._sums.get(unit.index)
        if found is None:
            parts = unit.layout.parts(self._ranks.shard_rank)
            found = self._sums[unit.index] = DeviceSquares(self._places.device, parts, self._places.kernels)
        return found


def _zero(elements: torch.Tensor, start: int, stop: int) -> None:
    """Zero `elements[start:stop]`, which is mostly empty."""
    if start < stop:
        elements[start:stop].zero_()


def _whole(shard: torch.Tensor) -> list[Piece]:
    return [(0, shard.numel())]


def _arrived(pieces: Iterable[Piece], copies: Iterable[Transfer]) -> Iterator[Piece]:
    for piece, copy in zip(pieces, copies, strict=True):
        copy.wait()
        yield piece
