"""Assigns device buffers to units. A unit takes a free buffer, or that of the unit that is needed furthest in future.

The rule is Belady's over the recorded trace, and least recently used while there is none (`Schedule.victims`).

A device compares a buffer with its tier behind all compute issued so far. So an eviction has two phases there: the
comparison starts at one use of a unit, and is collected at a later one, when another unit gets the buffer. Nothing
changes the buffer meanwhile, since its parameters are placeholders and no view is alive.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from infinity.errors import InfinityError
from infinity.schedule.schedule import Schedule
from infinity.tiers.pool import Lease, Pool
from infinity.units.unit import Residency, Unit
from infinity.units.write_back import EditCheck
from infinity.update.job import UpdateProgress

EXTRA = 2
"""Buffers of a size that may be made while others hold those of the plan, which expects units in their order."""


@dataclass(frozen=True, eq=False)
class Leaving:
    """A buffer that `unit` has left. It is released once `check` is collected."""

    unit: Unit
    lease: Lease
    check: EditCheck
    update: UpdateProgress | None
    """The update that brings an edit of the buffer to the tier; None: an edit has to be written."""
    in_backward: bool
    """True if the unit left in a backward that must not edit parameters."""


class UnitBuffers:
    """Leases of units from `pool`. `schedule` decides whose buffer a unit takes."""

    def __init__(
        self, units: Sequence[Unit], pool: Pool, schedule: Schedule, extents: Mapping[int, torch.Tensor]
    ) -> None:
        """extents: index → memory of units in place, whose buffer is their extent."""
        self._units = units
        self._pool = pool
        self._schedule = schedule
        self._in_place = {index: _pool_of(memory) for index, memory in extents.items()}
        self._sizes = [0 if unit.index in extents else pool.size_class(unit.layout.nbytes) for unit in units]
        """Size of each unit's buffer in bytes, by unit index; 0 in place."""
        self._leased: dict[int, Unit] = {}
        """index → unit, for units with a leased buffer."""
        self._leaving: dict[int, Leaving] = {}
        """index → the buffer that the unit has left, the first one first."""
        self._granted: Counter[int] = Counter()
        """Size → buffers that may be made besides `EXTRA`."""

    def __len__(self) -> int:
        """Return the number of units with a buffer."""
        return len(self._leased)

    def give(self, unit: Unit, lease: Lease) -> None:
        unit.give_buffer(lease)
        self._leased[unit.index] = unit

    def take(self, unit: Unit) -> Lease:
        """Remove and return the unit's lease."""
        del self._leased[unit.index]
        return unit.take_buffer()

    def leave(self, unit: Unit, check: EditCheck, update: UpdateProgress | None, *, in_backward: bool) -> None:
        """Take the unit's buffer, which is released once `check` is collected."""
        self._leaving[unit.index] = Leaving(unit, self.take(unit), check, update, in_backward)

    def left_by(self, unit: Unit) -> Leaving | None:
        """Return the buffer that the unit has left, if its comparison was not collected."""
        return self._leaving.get(unit.index)

    def leaving(self, unit: Unit) -> Leaving | None:
        """Return the first buffer of the unit's size that a unit has left."""
        size = self._sizes[unit.index]
        return next((each for index, each in self._leaving.items() if self._sizes[index] == size), None)

    def all_leaving(self) -> list[Leaving]:
        return list(self._leaving.values())

    def release(self, leaving: Leaving) -> None:
        """Give a collected buffer back to the pool."""
        del self._leaving[leaving.unit.index]
        leaving.lease.release()

    def in_place(self, unit: Unit) -> bool:
        """Return whether the unit's buffer is its extent [Note: units in place]."""
        return unit.index in self._in_place

    def exchange(self, unit: Unit) -> Lease:
        """Give a free buffer to a unit whose own was quarantined. Returns its lease.

        The quarantine added one to the pool, or left the pool with one extra buffer less, which is made again.
        """
        nbytes = unit.layout.nbytes
        lease = self._pool.try_lease(nbytes) or self._pool.lease_extra(nbytes, sys.maxsize)
        assert lease is not None
        unit.give_buffer(lease)
        return lease

    def missing(self, units: Iterable[Unit]) -> Counter[int]:
        """Return size → number of buffers that the pool lacks to hold `units` at once, beside those held now."""
        # Units that are pinned already have their buffer, so they ask for none.
        sizes = Counter(self._sizes[unit.index] for unit in units if not unit.pin_count and not self.in_place(unit))
        held = Counter(self._sizes[index] for index, unit in self._leased.items() if unit.pin_count)
        for size in list(sizes):
            sizes[size] -= self._pool.count(size) + self._pool.extra(size) - held[size]
        return +sizes

    def grant(self, sizes: Counter[int]) -> None:
        """Let as many more buffers be made where all are held, until `revoke`."""
        self._granted += sizes

    def revoke(self, sizes: Counter[int]) -> None:
        """Undo `grant`. Buffers that were made are freed as units are no longer held."""
        self._granted -= sizes

    def free(self, unit: Unit) -> Lease | None:
        """Return a free buffer for the unit, or None if there is none."""
        return self._in_place.get(unit.index, self._pool).try_lease(unit.layout.nbytes)

    def is_short(self, unit: Unit) -> bool:
        """Return whether no buffer of the unit's size is free or leaving."""
        return not self._pool.has_free(unit.layout.nbytes) and self.leaving(unit) is None

    def extra(self, unit: Unit) -> Lease:
        """Return a buffer beside the planned ones, for a unit that is needed now, when all of its size are held.

        Up to `EXTRA` and those of `grant` are made, until as many units of that size are no longer held. Raises
        InfinityError if those are held, too.
        """
        lease = self._pool.lease_extra(unit.layout.nbytes, EXTRA + self._granted[self._sizes[unit.index]])
        if lease is not None:
            return lease
        held = ", ".join(other.name for other in self._units if other.lease is not None and other.pin_count)
        raise InfinityError(
            f"unit {unit.name} needs a device buffer, and running modules or GatheredParameters hold all buffers of "
            f"its size ({held}). Raise infinity.prefetch_bytes, which sets how many units fit, or infinity.unit_size, "
            "so that fewer are held at once."
        )

    def exceed(self, unit: Unit) -> bool:
        """Return whether the unit has a buffer, and there are more of its size than planned."""
        return unit.lease is not None and not self.in_place(unit) and self._pool.extra(unit.layout.nbytes) > 0

    def leaves_first(self, unit: Unit) -> bool:
        """Return whether the unit is evicted before it is used again, as far as the trace shows."""
        return self._schedule.leaves_first(unit.index, self._pool.count(unit.layout.nbytes))

    def victims(self, unit: Unit) -> list[tuple[float, Unit]]:
        """Return (distance of next use, unit) for units whose buffer `unit` could take, furthest first."""
        evictable = (index for index, other in self._leased.items() if not other.pin_count)
        return [(distance, self._units[index]) for distance, index in self._schedule.victims(unit.index, evictable)]

    def later_than(self, unit: Unit) -> Iterator[Unit]:
        """Yield the units whose buffer a prefetch of `unit` may take: those needed after it, furthest first.

        A single rank leaves out those whose eviction would wait or cost a buffer.
        """
        # A prefetch that evicts a unit needed sooner would only exchange one wait for another.
        needed = self._schedule.trace.next_use(unit.index)
        for next_use, victim in self.victims(unit):
            if next_use <= needed:
                return
            # Several ranks take the victim of the trace even if that waits: ranks differ in which are busy [Note:
            # eviction on several ranks].
            if not self._schedule.alone or not (_is_busy(victim) or _is_viewed(victim)):
                yield victim

    def by_cost(self, unit: Unit) -> Iterator[Unit]:
        """Yield the units whose buffer `unit` may take now: first those that are free to evict, then those that cost a
        wait, then those that cost a buffer. Several ranks keep the order of the trace.
        """
        waiting, viewed = [], []
        for _, victim in self.victims(unit):
            if self._schedule.alone and _is_viewed(victim):
                viewed.append(victim)
            elif self._schedule.alone and _is_busy(victim):
                waiting.append(victim)
            else:
                yield victim
        # Waiting takes time once; a viewed buffer stays with its views, and costs another one.
        yield from waiting
        yield from viewed


def _pool_of(memory: torch.Tensor) -> Pool:
    """Return a pool whose one buffer is `memory`, for the unit that it belongs to. It poisons nothing."""
    return Pool(lambda _: memory, {memory.numel(): 1}, name="a unit in place")


def _is_busy(unit: Unit) -> bool:
    """Return whether evicting the unit would have to wait for a transfer or an update."""
    if unit.update is not None and not unit.update.done.done():
        return True
    return unit.transfer is not None and not unit.transfer.done()


def _is_viewed(unit: Unit) -> bool:
    """Return whether a resident unit's parameters have live views. Other units' buffers are used by transfers only."""
    return unit.residency is Residency.RESIDENT and unit.is_viewed()
