"""Bytes that a plan takes of each memory of a node, and the smallest change with which it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from infinity.engine.budget import host_share
from infinity.plan.placement import State
from infinity.plan.plan import Plan
from infinity.plan.remedy import Trial, needed
from infinity.plan.shortage import Shortage, exceeded
from infinity.sim.machine import Machine
from infinity.sizes import show_bytes
from infinity.tier_kind import TierKind

KINDS = ("params", "gradients", "optimizer", "activations", "buffers")
FREED = 0.25
"""Share of a predicted peak that freed blocks may add, as measured (docs/plan.md): predictions were up to 22 % low."""
_CHECKPOINT = "checkpoint activations (torch.utils.checkpoint in the model, or a Trainer's gradient_checkpointing)"
_KIND = {State.PARAM: "params", State.GRAD: "gradients", State.OPTIM: "optimizer"}


@dataclass(frozen=True)
class Needs:
    """Bytes of a node. Without GPUs, the device's bytes are those of host memory."""

    tiers: Mapping[TierKind, Mapping[str, int]]
    """Tier → kind → bytes: extents of states, activations and buffers."""
    peak: Mapping[TierKind, int]
    """Tier → the most bytes at once; host: with the processes themselves."""
    passing: Mapping[TierKind, int]
    """Tier → bytes of gradients, counted in `tiers` and `peak`, that are stored only in the first steps and in steps
    that depart from the trace."""
    available: Mapping[TierKind, int]
    ranks: int = 1
    """Ranks of a node."""
    exceeded: Sequence[Shortage] = ()
    """Limits of `infinity.memory` that the plan of a rank exceeds, at which the engine would not start."""

    @property
    def lacking(self) -> list[TierKind]:
        """Return the tiers of which the machine has too little."""
        return [tier for tier in TierKind if self.peak[tier] > self.available[tier]]

    @property
    def limits(self) -> list[TierKind]:
        """Return the tiers of which the machine, or `infinity.memory`, gives too little."""
        over = {each.tier for each in self.exceeded}
        return [tier for tier in TierKind if tier in over or tier in self.lacking]

    def spare(self, tier: TierKind) -> int:
        return self.available[tier] - self.peak[tier]


def needs_of(
    plan: Plan, machine: Machine, *, activations: Mapping[TierKind, int], baseline_rss: int, registered: int = 0
) -> Needs:
    """Return the bytes that all ranks of a node take together.

    activations: tier → peak bytes of one rank that autograd saves, besides parameters. baseline_rss: resident bytes of
    a process before it makes an engine. registered: bytes of the model's own buffers, which a rank has on its device.
    """
    ranks = machine.ranks_per_node
    place = {tier: TierKind.HOST if tier.on_device and not machine.gpus else tier for tier in TierKind}
    tiers = {tier: dict.fromkeys(KINDS, 0) for tier in TierKind}
    for extents in (plan.placement.extents, plan.placement.spares):
        for (_, state), extent in extents.items():
            tiers[place[extent.tier]][_KIND[state]] += extent.nbytes * ranks
    if plan.io is not None and plan.io.durable is not None:
        for state, nbytes in plan.io.durable.added():
            tiers[TierKind.NVME][_KIND[state]] += nbytes * ranks
    for pool in plan.pools:
        tiers[place[pool.tier]]["buffers"] += pool.nbytes * ranks
    tiers[place[TierKind.DEVICE]]["buffers"] += plan.step_nbytes * ranks
    peak, passing = dict.fromkeys(TierKind, 0), dict.fromkeys(TierKind, 0)
    for tier, nbytes in plan.peak_nbytes().items():
        peak[place[tier]] += nbytes * ranks
        passing[place[tier]] += plan.passing.get(tier, 0) * ranks
    for tier, nbytes in activations.items():
        tiers[place[tier]]["activations"] += nbytes * ranks
        peak[place[tier]] += nbytes * ranks
    tiers[place[TierKind.DEVICE]]["buffers"] += registered * ranks
    peak[place[TierKind.DEVICE]] += registered * ranks
    peak[TierKind.HOST] += baseline_rss * ranks
    available = {
        TierKind.DEVICE: machine.device_memory * machine.gpus,
        TierKind.HOST: machine.host_memory,
        TierKind.NVME: machine.nvme,
    }
    return Needs(tiers, peak, passing, available, ranks, tuple(exceeded(plan)))


@dataclass(frozen=True)
class Savings:
    """Changes that are left to make."""

    checkpoint: bool
    """The model can recompute activations, and does not."""
    smaller_batch: bool
    """A micro-batch has several sequences."""
    activations: Mapping[TierKind, int]
    """Tier → bytes of a node that `infinity.activations.device` `"nvme"` frees there."""
    remedy: Callable[[Shortage], str]
    """Limit of `infinity.memory` that is exceeded → a change with which the plan fits it."""
    planned: Callable[[Shortage], Sequence[Trial]]
    """Memory of a rank that is lacking → changes of states and buffers, the best first."""


def advice(plan: Plan, needs: Needs, savings: Savings) -> Iterator[str]:
    """Yield, for each limit of `infinity.memory` and each tier that is exceeded, the bytes it lacks and the changes
    with which the plan would fit.
    """
    for over in needs.exceeded:
        lacking = show_bytes(over.needed - over.available)
        yield f"{over.key} is {lacking} a rank too small: {savings.remedy(over)}"
    for tier in needs.lacking:
        missing = -needs.spare(tier)
        changes = _changes(plan, needs, tier, savings, missing)
        freed = sum(nbytes for nbytes, _ in changes)
        more = f". This frees at most {show_bytes(freed)}: use a smaller model or more nodes" if freed < missing else ""
        yield f"{memory_name(tier)} is {show_bytes(missing)} too small: {', and '.join(enough(changes, missing))}{more}"


def memory_name(tier: TierKind) -> str:
    return f"{tier} memory" if tier.in_memory else str(tier)


def kept_by_auto(plan: Plan, needs: Needs) -> int:
    """Return the bytes of a node's states on nvme that `infinity.memory.host: "auto"` keeps in host memory at most."""
    computes_on_host = plan.device.host_addressable
    held = needs.tiers[TierKind.HOST]
    filled = sum(nbytes for kind, nbytes in held.items() if kind != "activations")
    room = host_share(needs.available[TierKind.HOST], computes_on_host=computes_on_host) - filled
    states = sum(needs.tiers[TierKind.NVME][kind] for kind in _KIND.values())
    return max(0, min(room, needs.spare(TierKind.HOST), states))


def enough(changes: list[tuple[int, str]], missing: int) -> list[str]:
    """Return the first change that frees `missing` bytes; else the largest ones that do together, or all."""
    for freed, change in changes:
        if freed >= missing:
            return [change]
    chosen: list[str] = []
    for freed, change in sorted(changes, key=lambda item: -item[0]):
        if missing > 0 and freed > 0:
            chosen.append(change)
            missing -= freed
    return chosen or [changes[-1][1]]


def _changes(plan: Plan, needs: Needs, tier: TierKind, savings: Savings, missing: int) -> list[tuple[int, str]]:
    """Return (the bytes that it frees, change), the best first."""
    held, ranks = needs.tiers[tier], needs.ranks
    if not tier.in_memory:
        native = [layout for layout in plan.units if layout.trainable and not layout.windows]
        is_small = not native or plan.policy.states(native[0]).bytes_per_element <= 5
        moments = "" if is_small else ', or infinity.moments "8bit"'
        states = held["params"] + held["gradients"] + held["optimizer"]
        return [(states, f"use a larger drive or more nodes{moments}")]
    before = needed(plan, tier)
    with_reserve = needs.peak[tier] - int(needs.available[tier] / (1 + FREED))
    for lacking in (with_reserve, missing) if plan.device.host_addressable else (missing,):
        short = Shortage(tier, memory_name(tier), before, before - -(-lacking // ranks))
        planned = [((before - needed(trial.plan, tier)) * ranks, str(trial)) for trial in savings.planned(short)]
        if found := [change for change in planned if change[0] >= lacking][:1]:
            break
    else:
        found = sorted(planned)[-1:]
    if moved := savings.activations.get(tier, 0):
        found.append((moved, f'set infinity.activations.device to "nvme", which frees {show_bytes(moved)}'))
    fewer = [
        change
        for change, is_left in (
            (_CHECKPOINT, savings.checkpoint),
            ("use a smaller micro-batch or shorter sequences", savings.smaller_batch),
        )
        if is_left
    ]
    if fewer:
        found.append((held["activations"], ", and if that is not enough ".join(fewer)))
    return found or [(0, "use a smaller model or more nodes")]
