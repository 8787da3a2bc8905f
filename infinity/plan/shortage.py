"""Memory that a plan exceeds or leaves, and the change that helps most. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from infinity.plan.placement import State, aligned
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


class Exceeded(NamedTuple):
    """A limit of `infinity.memory` that a rank's plan exceeds: bytes needed, bytes allowed, and a fix."""

    tier: TierKind
    kind: str
    needed: int
    limit: int
    fix: str


def exceeded(plan: Plan) -> Iterator[Exceeded]:
    """Yield the limits of `infinity.memory` that the plan exceeds."""
    needed = plan.peak_nbytes()
    limits = (
        (TierKind.DEVICE, "memory", needed[TierKind.DEVICE], plan.device.limit or None),
        (TierKind.HOST, "memory", plan.peak_of_host(), plan.budget.host),
        (TierKind.NVME, "space", needed[TierKind.NVME], plan.budget.nvme),
    )
    for tier, kind, nbytes, limit in limits:
        if limit is not None and nbytes > limit:
            fix = (tier.on_device and _smaller_budget(plan, tier)) or _fix(plan, tier)
            yield Exceeded(tier, kind, nbytes, limit, f"raise infinity.memory.{tier}, or {fix}")


def shortage(plan: Plan, available: Mapping[TierKind, int]) -> tuple[str, int, int, str] | None:
    """Return (memory, bytes needed, bytes available, fix) of the first memory that the plan exceeds; None if it fits.

    available: bytes of the host's memory and, unless the host computes, of the device's.
    """
    over = next(exceeded(plan), None)
    if over is not None:
        return f"{over.tier} {over.kind} (infinity.memory.{over.tier})", over.needed, over.limit, over.fix
    needed = {TierKind.HOST: plan.peak_of_host()}
    if not plan.in_host_memory(TierKind.DEVICE):
        needed[TierKind.DEVICE] = plan.peak_nbytes()[TierKind.DEVICE]
    for tier, nbytes in needed.items():
        if nbytes > available.get(tier, 0):
            fix = _smaller_budget(plan, tier) or _fix(plan, tier)
            return f"{tier} memory", nbytes, available.get(tier, 0), fix
    return None


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


def _smaller_budget(plan: Plan, tier: TierKind) -> str:
    """Return the fix that lowers the bytes that a budget holds in `tier`; empty if it holds none."""
    extents = plan.placement.extents.items()
    if all(plan.policy.tier_of(state) == tier for (_, state), extent in extents if extent.tier == tier):
        return ""
    if tier.on_device and plan.budget.device_optimizer:
        return "lower infinity.memory.device_optimizer (in DeepSpeed's keys: raise offload_optimizer.ratio)"
    if tier.on_device and plan.budget.device_states is not None:
        return "lower infinity.memory.device_states"
    if not tier.in_host_memory:
        return ""
    if plan.budget.host is not None:
        return "lower infinity.memory.host"
    return "lower infinity.memory.host_params (in DeepSpeed's keys: offload_param.max_in_cpu)"


def _fix(plan: Plan, tier: TierKind) -> str:
    """Return the fix that lowers the bytes in `tier`: of its extents, or of its pools if they are larger."""
    if not tier.in_memory:
        return 'use fewer bytes per parameter (bf16, or infinity.moments "8bit"), or more ranks'
    tiers = [each for each in TierKind if each is tier or (tier.in_host_memory and plan.in_host_memory(each))]
    extents = sum(held.get(name, 0) for held in (plan.placement.nbytes, plan.passing) for name in tiers)
    pools = sum(pool.nbytes for pool in plan.pools if pool.tier in tiers)
    movable = any(plan.policy.tier_of(state) in tiers for state in (State.PARAM, State.OPTIM))
    if plan.policy.resident or (movable and extents >= pools):
        devices = "nvme" if tier.in_host_memory else "cpu or nvme"
        return f"give offload_param or offload_optimizer the device {devices} (zero_optimization), or use more ranks"
    fix = smaller_buffers(plan, tiers)
    if not fix:
        return "use a smaller model, or more ranks"
    largest = max(plan.units, key=lambda layout: layout.nbytes)
    slot = max(largest.slots, key=lambda slot: slot.numel)
    if len(slot.shape) != 2 or 2 * slot.numel < largest.numel:
        return fix
    return (
        f"{fix}. The largest parameter is {slot.name} ({show_bytes(slot.numel * largest.dtype.itemsize)}). If it is an "
        "nn.Linear's, split it with infinity.nn.tile, and set infinity.unit_size to no more than a tile"
    )


def smaller_buffers(plan: Plan, tiers: Sequence[TierKind]) -> str:
    """Return the keys to lower for smaller buffers in `tiers`, with the bytes of a rank; empty: there are none."""
    keys = keys_of_buffers(plan, tiers)
    if not keys:
        return ""
    (first, nbytes), *others = keys
    changes = [f"{first} (its buffers take {show_bytes(nbytes)})"]
    changes += [f"{name} ({show_bytes(nbytes)})" for name, nbytes in others]
    return f"lower {' or '.join([', '.join(changes[:-1]), changes[-1]] if others else changes)}"


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
