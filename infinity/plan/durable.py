"""Places of durable states: two slots on nvme for every parameter and optimizer state, whatever its tier. Pure.

An update writes the slot that is not committed, so that the last committed step stays whole until the next one is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from infinity.plan.placement import Extent, Placement, State, aligned
from infinity.tier_kind import TierKind


@dataclass(frozen=True)
class Durable:
    """One durable extent. first, second: its slots on nvme. working: the extent that training reads and writes, which
    is `first` if the state lies on nvme.
    """

    unit: int
    state: State
    working: Extent
    first: Extent
    second: Extent


@dataclass(frozen=True)
class DurablePlan:
    """A run whose states survive the process: its name, its extents, and the bytes that their slots add on nvme.

    block: bytes of a block that is always written whole, whose checksum is part of an extent's digest.
    """

    run: str
    extents: tuple[Durable, ...]
    nbytes: int
    block: int = 4096

    def added(self) -> Iterator[tuple[State, int]]:
        """Yield the state and the bytes of each slot that no extent of the placement is."""
        for each in self.extents:
            slots = (each.second,) if each.first is each.working else (each.first, each.second)
            yield from ((each.state, aligned(slot.nbytes)) for slot in slots)

    @property
    def slot_nbytes(self) -> int:
        """Return the bytes of all slots."""
        return sum(aligned(each.first.nbytes) + aligned(each.second.nbytes) for each in self.extents)


def plan_durable(run: str, placement: Placement, used: int) -> DurablePlan:
    """Place the slots after the first `used` bytes of the tier nvme. Gradients have none: no commit holds any."""
    found: list[Durable] = []
    end = -(-used // aligned(1)) * aligned(1)

    def next_slot(extent: Extent) -> Extent:
        nonlocal end
        place = replace(extent, tier=TierKind.NVME, offset=end)
        end += aligned(extent.nbytes)
        return place

    for (unit, state), extent in placement.extents.items():
        if state is State.GRAD:
            continue
        first = next_slot(extent) if extent.tier.in_memory else extent
        found.append(Durable(unit, state, extent, first, next_slot(extent)))
    return DurablePlan(run, tuple(found), end - used)
