"""Memory that a plan exceeds or leaves. `infinity.plan.remedy` finds the change with which it fits. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from infinity.plan.placement import aligned
from infinity.plan.plan import Plan
from infinity.plan.pools import ACTIVATIONS, COLLECTIVES, GRADIENT_TILES, READ_AHEAD, STAGING, TILES, UNITS
from infinity.sizes import show_bytes
from infinity.tier_kind import TierKind

_KEYS = {
    TILES: "infinity.tile_size",
    GRADIENT_TILES: "infinity.tile_size",
    READ_AHEAD: "infinity.read_ahead_bytes",
    ACTIVATIONS: "infinity.activations.memory_bytes",
}
"""Pool → the key that sizes it, if not `infinity.unit_size`."""
_FIXED = frozenset({STAGING, COLLECTIVES})
"""Pools whose size no key lowers."""

_FRAGMENTS = 16
"""Divisor of the bytes that steps leave: this part stays free, since an allocator's free memory is in fragments."""


class Shortage(NamedTuple):
    """Memory of a rank that a plan exceeds: bytes needed and available."""

    tier: TierKind
    name: str
    needed: int
    available: int
    key: str = ""
    """The key of the config that sets the limit; empty: the machine does."""


def exceeded(plan: Plan) -> Iterator[Shortage]:
    """Yield the limits of `infinity.memory` that the plan exceeds."""
    needed = plan.peak_nbytes()
    limits = (
        (TierKind.DEVICE, "memory", needed[TierKind.DEVICE], plan.device.limit or None),
        (TierKind.HOST, "memory", plan.peak_of_host(), plan.budget.host),
        (TierKind.NVME, "space", needed[TierKind.NVME], plan.budget.nvme),
    )
    for tier, kind, nbytes, limit in limits:
        if limit is not None and nbytes > limit:
            key = f"infinity.memory.{tier}"
            yield Shortage(tier, f"{tier} {kind} ({key})", nbytes, limit, key)


def shortage(plan: Plan, available: Mapping[TierKind, int]) -> Shortage | None:
    """Return the first memory that the plan exceeds; None if it fits.

    available: bytes of the host's memory and, unless the host computes, of the device's.
    """
    needed = {TierKind.HOST: plan.peak_of_host()}
    if not plan.in_host_memory(TierKind.DEVICE):
        needed[TierKind.DEVICE] = plan.peak_nbytes()[TierKind.DEVICE]
    lacking = (
        Shortage(tier, f"{tier} memory", nbytes, available.get(tier, 0))
        for tier, nbytes in needed.items()
        if nbytes > available.get(tier, 0)
    )
    return next(exceeded(plan), None) or next(lacking, None)


def spare(plan: Plan, unused: int) -> str:
    """Return a sentence on device memory that training leaves, with the key that fills it; empty: no state fits.

    unused: bytes of the device's memory that no step has taken.
    """
    placement, elsewhere = plan.placement, Counter[int]()
    for (unit, state), extent in placement.extents.items():
        if not extent.tier.on_device:
            elsewhere[unit] += aligned(placement.of(unit, state).nbytes)
    fits = min(elsewhere.values(), default=unused + 1) <= unused - unused // _FRAGMENTS
    if plan.device.host_addressable or not plan.device.updates or plan.budget.device_optimizer is not None or not fits:
        return ""
    held = plan.peak_nbytes()[TierKind.DEVICE]
    return (
        f"device memory: {show_bytes(held)} are planned for states and buffers, and the steps so far have left "
        f"{show_bytes(unused)} unused. To keep more states there, set infinity.memory.device_states to "
        f"{held + unused - unused // _FRAGMENTS}"
    )


def keys_of_buffers(plan: Plan, tiers: Sequence[TierKind]) -> list[tuple[str, int]]:
    """Return the keys that size the buffers in `tiers`, each with the bytes of these; the most bytes first."""
    ahead = max(0, plan.buffer_bytes(UNITS) - plan.least_unit_bytes) if TierKind.DEVICE in tiers else 0
    keys = ("infinity.prefetch_bytes", plan.prefetch_bytes), ("infinity.cache_bytes", plan.cached_bytes)
    found = {" and ".join(key for key, nbytes in keys if nbytes): ahead, "infinity.unit_size": -ahead}
    for pool in plan.pools:
        if pool.tier in tiers and pool.name not in _FIXED:
            key = _KEYS.get(pool.name, "infinity.unit_size")
            found[key] = found.get(key, 0) + pool.nbytes
    return sorted(((key, nbytes) for key, nbytes in found.items() if nbytes > 0), key=lambda item: -item[1])
