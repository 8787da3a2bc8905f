"""Chooses the units whose updates may be drafts: computed during backward although the norm is not known. Pure.

A draft writes a second slot of the unit's states, so that those of before stay until `engine.step()` knows that no
gradient had to be scaled. [Note: updates before the norm is known]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from infinity.plan.budget import Budget
from infinity.plan.layout import UnitLayout
from infinity.plan.placement import Placement, State, aligned
from infinity.plan.policy import DeviceInfo, updated_in_forward
from infinity.tier_kind import TierKind

_IN_MEMORY = 0.75
"""Largest share of drafts with second slots in host memory: forward, a quarter to a third of a step, hides the other
updates."""

Slots = Collection[tuple[int, State]]
"""(unit index, state) that get a second slot."""


@dataclass(frozen=True)
class Drafts:
    """Units whose updates may be drafts, and the states that need a second slot for it."""

    units: frozenset[int] = frozenset()
    slots: Slots = ()


def choose_drafts(
    layouts: Sequence[UnitLayout],
    placement: Placement,
    budget: Budget,
    device: DeviceInfo,
    taken: Mapping[TierKind, int],
    *,
    durable: bool,
) -> Drafts:
    """Return the largest share of the units, spread evenly, whose second slots have room.

    taken: tier → bytes of the plan without second slots; host: with the device's if the host computes. durable: states
    on nvme have two slots anyway.
    """
    # A rule in Python changes states in place, so that no second slot would keep those of before.
    native = [layout for layout in layouts if layout.trainable and not layout.windows]
    units = [layout for layout in native if _gains(placement, layout.index, device)]
    room = _room(budget, device, taken)

    def slots(chosen: Collection[int]) -> list[tuple[int, State]]:
        keys = [(unit, state) for unit in sorted(chosen) for state in (State.PARAM, State.OPTIM)]
        return [key for key in keys if not durable or placement.of(*key).tier.in_memory]

    def needed(chosen: Collection[int]) -> dict[TierKind, int]:
        found = dict.fromkeys(TierKind, 0)
        for key in slots(chosen):
            extent = placement.of(*key)
            found[_memory(extent.tier, device)] += aligned(extent.nbytes)
        return found

    chosen = _fitting(units, room, needed)
    return Drafts(frozenset(chosen), tuple(slots(chosen)))


def _gains(placement: Placement, unit: int, device: DeviceInfo) -> bool:
    """Return whether an update in the next forward takes time that one during backward does not.

    An update on the device takes the device's time in both. If the host computes, so does one in memory.
    """
    tier = placement.of(unit, State.OPTIM).tier
    return not (tier.in_memory if device.host_addressable else tier.on_device)


def _room(budget: Budget, device: DeviceInfo, taken: Mapping[TierKind, int]) -> dict[TierKind, float]:
    """Return tier → bytes for second slots. Host memory is used only if `infinity.memory.host` gives a limit. Half of
    the free space on nvme is left to others.
    """
    host = 0 if budget.host is None else budget.host - taken[TierKind.HOST]
    nvme = float("inf") if budget.nvme is None else budget.nvme - taken[TierKind.NVME]
    if budget.free_nvme is not None:
        nvme = min(nvme, (budget.free_nvme - taken[TierKind.NVME]) // 2)
    return {TierKind.DEVICE: 0, TierKind.HOST: max(0, host), TierKind.NVME: max(0, nvme)}


def _memory(tier: TierKind, device: DeviceInfo) -> TierKind:
    """Return the memory that a tier takes: the host's for the device's tier if the host computes."""
    return TierKind.HOST if tier.on_device and device.type == "cpu" else tier


def _fitting(
    units: Sequence[UnitLayout],
    room: Mapping[TierKind, float],
    needed: Callable[[Collection[int]], Mapping[TierKind, int]],
) -> set[int]:
    """Return as many of `units`, spread evenly, as there is room for."""
    whole = needed([unit.index for unit in units])
    most = _IN_MEMORY if whole[TierKind.HOST] else 1.0
    share = min([most, *(room[tier] / nbytes for tier, nbytes in whole.items() if nbytes)])
    chosen = {unit.index for unit in units} - updated_in_forward(units, 1 - share)
    # Units differ in size, so the share of the elements may take more than its bytes.
    for unit in sorted(units, key=lambda unit: -unit.numel):
        if all(nbytes <= room[tier] for tier, nbytes in needed(chosen).items()):
            break
        chosen.discard(unit.index)
    return chosen
