"""Passes reduced gradients to the update at once, or to their tier, where later gradients of the step are added.

A thread of its own moves them, in order of submission, so that backward does not wait for reductions. A second one
waits for writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from infinity import concurrency
from infinity.comm.communicator import Communicator
from infinity.errors import OutOfSpaceError
from infinity.grads.buffers import GradBuffers, Sent
from infinity.grads.landing import Landing
from infinity.plan.placement import State
from infinity.sizes import sum_in_order
from infinity.tiers.memory import host_tensor
from infinity.tiers.transfer import Transfer
from infinity.units.unit import Unit
from infinity.update.job import INLINE, Gradient, Squares
from infinity.update.kernels import squared_norm

_Result = TypeVar("_Result")


class _Finished(Future[_Result]):
    """A finished future. Nobody waits for it, so it lacks what a wait needs: a lock, a condition and callbacks."""

    def __init__(self, value: Any, error: BaseException | None = None) -> None:
        self._value, self._error = value, error

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> _Result:
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # breaks the cycle error -> frame -> self
        return self._value  # type: ignore[no-any-return]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._error


def _carried_out(work: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
    """Run `work` in the calling thread and return a finished future with its result or exception."""
    try:
        return _Finished(work(*arguments))
    except Exception as error:  # noqa: BLE001 - raised by the waiter
        return _Finished(None, error)


def _finish(stored: Transfer, gradient: Gradient) -> None:
    try:
        stored.wait()
    finally:
        gradient.release()


def _squares_of(gradient: Future[Gradient]) -> Squares:
    """Return the gradient's sum of squares; NaN if it did not land, since the update raises that error."""
    return Squares(math.nan) if gradient.exception() is not None else gradient.result().squares


def _is_over(move: Future[Future[None] | None]) -> bool:
    """Return whether a move has ended without an error, and its write, too."""
    if not move.done() or move.exception() is not None:
        return False
    written = move.result()
    return written is None or (written.done() and written.exception() is None)


class GradStore:
    """Stores the reduced gradients of one step."""

    def __init__(self, ranks: Communicator, places: GradBuffers) -> None:
        self.units: set[int] = set()
        """Units whose gradient, or part of it, is stored in its tier for the update."""
        self.slots: dict[int, set[int]] = {}
        """unit → slots that received a gradient in this step, on any rank; complete once the gradient has landed."""
        self._ranks = ranks
        self._places = places
        self._landing = Landing(ranks, places)
        self._squares: dict[int, Future[Squares]] = {}
        """unit → sum of squares of its stored gradient."""
        self._unsummed: dict[int, Unit] = {}
        """Units whose stored gradient has no sum of squares yet."""
        self._landed: dict[int, Future[Gradient]] = {}
        """unit → gradient that was passed to the update."""
        self._moves: list[Future[Future[None] | None]] = []
        """Moves, each with the end of its write if that continues."""
        self._mover, self._writer = (
            concurrency.one_thread(f"infinity-{name}", places.device.enter_thread) for name in ("grads", "grad-writes")
        )

    def land(self, sent: Sent) -> Future[Gradient]:
        """Return the gradient plus the stored part, in memory that the update can work in."""
        # An earlier micro-batch may have stored a part, which the update must not find again.
        add = sent.unit.index in self.units
        self.units.discard(sent.unit.index)
        move = self._mover_of(sent, uses_tier=add)
        landed = self._landed[sent.unit.index] = move(self._landing.land, sent, self.slots, add)
        return landed

    def keep(self, sent: Sent, *, lands: bool = False) -> Future[Gradient] | None:
        """Store a gradient, or add it to the stored one. Raises OutOfSpaceError, before any change, if its tier has too
        little space.

        lands: return it as `land` does, too.
        """
        index = sent.unit.index
        try:
            # Before anything is recorded, so that a full disk loses this step only [Note: a disk that has become
            # full].
            self._places.tier_of(sent.unit).reserve(self._places.extent_of(sent.unit))
        except OutOfSpaceError:
            sent.drop()
            raise
        add = index in self.units
        self.units.add(index)
        squares: Future[Squares] = concurrency.future()
        self._squares[index] = squares
        # A later micro-batch changes the sum, so the norm is summed once, over the last one.
        if sent.last or self._landing.sums_each(sent.unit):
            self._unsummed.pop(index, None)
        else:
            self._unsummed[index] = sent.unit
        landed: Future[Gradient] | None = concurrency.future() if lands else None
        move = self._mover_of(sent, uses_tier=True)
        self._moves.append(move(self._keep, sent, self.slots, add, squares, landed))
        return landed

    def _mover_of(self, sent: Sent, *, uses_tier: bool) -> Callable[..., Future[Any]]:
        """Return the function that runs a move: in this thread, if nothing has to be waited for and waking the other
        one takes longer than the copy. uses_tier: the move reads or writes the gradient's extent.

        The result is the same for all gradients of a unit, except if its tier is not immediate: moves that use the tier
        then stay in order.
        """
        unit, places = sent.unit, self._places
        small = unit.layout.shard_numel <= INLINE and self._ranks.is_single and places.device.host_addressable
        return _carried_out if small and (not uses_tier or places.tier_of(unit).immediate) else self._mover.submit

    # -- the threads -------------------------------------------------------------------------------------------------

    def _keep(
        self,
        sent: Sent,
        slots: dict[int, set[int]],
        add: bool,
        squares: Future[Squares],
        landed: Future[Gradient] | None,
    ) -> Future[None] | None:
        """Store a gradient. Returns the end of its write if that continues. slots: `self.slots` of the gradient's step,
        which may have ended since.
        """
        try:
            sent.await_issue(slots)
            gradient, stored = self._landing.store(sent, add=add)
        # Otherwise the norm at step() would wait for a sum that never comes.
        except BaseException as error:
            squares.set_exception(error)
            if landed is not None:
                landed.set_exception(error)
            raise
        try:
            squares.set_result(gradient.squares)
            if landed is not None:
                landed.set_result(self._landing.read_by_update(sent.unit, gradient))
            # Another thread waits, so that this one moves the next gradient meanwhile.
            written = None if stored.done() else self._writer.submit(_finish, stored, gradient)
        except BaseException:  # too little memory; the model's thread may wait for this gradient's buffer
            _finish(stored, gradient)
            raise
        if written is None:
            _finish(stored, gradient)
        else:
            self._landing.note_writing(sent.unit, written)
        return written

    # -- access ------------------------------------------------------------------------------------------------------

    def read(self, unit: Unit) -> torch.Tensor:
        """Return a unit's stored gradient, summed over ranks, whole on every rank: (numel,) in host memory."""
        self.settle()
        places = self._places
        dtype = places.dtypes_of(unit).stored
        flat = host_tensor(unit.layout.numel * dtype.itemsize)
        places.tier_of(unit).read(places.extent_of(unit), self._ranks.shard(flat)).wait()
        self._ranks.complete(flat)
        return flat.view(dtype)

    def write(self, unit: Unit, flat: torch.Tensor) -> None:
        """Replace a unit's stored gradient. flat: as returned by `read`."""
        shard = self._ranks.shard(flat)
        # A shard begins anywhere in the flat tensor, and direct I/O needs aligned memory.
        aligned = host_tensor(shard.numel() * shard.element_size())
        aligned.copy_(shard.view(torch.uint8))
        self._places.tier_of(unit).write(self._places.extent_of(unit), aligned).wait()
        total = squared_norm(shard, unit.layout.parts(self._ranks.shard_rank))
        self._squares[unit.index] = _carried_out(Squares, total)
        self._unsummed.pop(unit.index, None)

    # -- the step ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until every gradient has landed. Raises the error of one that failed, until gradients are dropped."""
        with self._places.device.recorder.wait("reduce", "gradients"):
            for move in self._moves:
                if (written := move.result()) is not None:
                    written.result()
        self._moves = []

    def squared_norms(self) -> tuple[float, ...]:
        """Return the sums of squares over all ranks of the stored gradients, and of all gradients of the step.

        Units are added in their order. Waits for the gradients.
        """
        self._sum_unsummed()
        # Units are added in one order whatever the order of arrival, which keeps the bits [Note: the gradient norm].
        landed = [self._squares[index] for index in sorted(self.units)]
        with self._places.device.recorder.wait("reduce", "gradients"):
            found = [squares.result() for squares in landed]
        stored = sum_in_order(squares.total() for squares in found)
        totals = stored, self.step_squares()() if self._landed else stored
        return self._ranks.sums(*totals) if self._ranks.shards > 1 else totals

    def step_squares(self) -> Callable[[], float]:
        """Return a function that waits for all gradients of the step and returns their sum of squares on this rank, in
        unit order. It may be called after the step.
        """
        self._sum_unsummed()
        # The end of a step replaces these collections and does not change them.
        stored, squares, landed = self.units, self._squares, self._landed
        recorder = self._places.device.recorder

        def total() -> float:
            units = sorted({*stored, *landed})
            with recorder.wait("reduce", "gradients"):
                found = [squares[i].result() if i in stored else _squares_of(landed[i]) for i in units]
            return sum_in_order(each.total() for each in found)

        return total

    def _sum_unsummed(self) -> None:
        """Sum the squares of stored gradients that no later micro-batch has added to."""
        for index, unit in self._unsummed.items():
            if index in self.units:
                self._squares[index] = self._mover.submit(self._landing.squares_of_stored, unit)
        self._unsummed = {}

    def drop(self, units: Iterable[int]) -> None:
        """Drop stored gradients, whose update does not need them any more."""
        dropped = set(units)
        self.units = self.units - dropped  # `step_squares` keeps the set of before
        for index in dropped:
            extent = self._places.placement.of(index, State.GRAD)
            self._places.tiers[extent.tier].discard(extent)

    def take_ready(self) -> list[int]:
        """Return the units with stored gradients, in unit order, and pass the gradients on to the update."""
        units, self.units = sorted(self.units), set()
        return units

    def forget(self) -> None:
        """Reset the step, and drop gradients that were not passed to the update. Moves of the others continue."""
        self.drop(self.units)
        # Memory that no later step has needed goes back here [Note: gradients that wait for an update].
        for tier in self._places.tiers.values():
            tier.trim()
        self._moves = [move for move in self._moves if not _is_over(move)]
        self.units = set()
        self.slots = {}
        self._squares = {}
        self._unsummed = {}
        self._landed = {}

    def discard(self) -> None:
        """Drop all gradients and ignore errors of their moves."""
        # Waits for each move before its extent is dropped; errors belong to gradients that nobody wants.
        for move in self._moves:
            if move.exception() is None and (written := move.result()) is not None:
                written.exception()
        self._moves = []
        self.forget()

    def close(self) -> None:
        self._mover.shutdown()
        self._writer.shutdown()
        self._landing.close()
