"""Bytes that a plan takes of each memory of a node, and the smallest change with which it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from infinity.observe.units import show_bytes
from infinity.plan.placement import State
from infinity.plan.plan import Plan
from infinity.sim.machine import Machine

TIERS = ("device", "host", "nvme")
KINDS = ("params", "gradients", "optimizer", "activations", "buffers")
_KIND = {State.PARAM: "params", State.GRAD: "gradients", State.OPTIM: "optimizer"}


@dataclass(frozen=True)
class Needs:
    """Bytes of a node. Without GPUs, the device's bytes are those of host memory."""

    tiers: Mapping[str, Mapping[str, int]]
    """Tier → kind → bytes: extents of states, activations and buffers."""
    peak: Mapping[str, int]
    """Tier → the most bytes at once; host: with the processes themselves."""
    passing: Mapping[str, int]
    """Tier → bytes of these for gradients that only the first steps, and those that depart from the trace, store."""
    available: Mapping[str, int]

    @property
    def limits(self) -> list[str]:
        """Return the tiers that the plan exceeds."""
        return [tier for tier in TIERS if self.peak[tier] > self.available[tier]]

    def missing(self, tier: str) -> int:
        return max(0, self.peak[tier] - self.available[tier])


def needs_of(plan: Plan, machine: Machine, *, activations: int, baseline_rss: int) -> Needs:
    """Return what all ranks of a node take together.

    activations: peak bytes of one rank that autograd saves, besides parameters. baseline_rss: resident bytes of a
    process before it makes an engine.
    """
    ranks = machine.ranks_per_node
    tiers = {tier: dict.fromkeys(KINDS, 0) for tier in TIERS}
    for (_, state), extent in plan.placement.extents.items():
        tiers[extent.tier][_KIND[state]] += extent.nbytes * ranks
    for pool in plan.pools:
        tiers[pool.tier]["buffers"] += pool.nbytes * ranks
    tiers["device"]["activations"] = activations * ranks
    peak = {tier: nbytes * ranks for tier, nbytes in plan.peak_nbytes().items()}
    peak["device"] += activations * ranks
    peak["host"] += baseline_rss * ranks
    if not machine.gpus:
        peak["host"], peak["device"] = peak["host"] + peak["device"], 0
        merged = {kind: tiers["host"][kind] + tiers["device"][kind] for kind in KINDS}
        tiers["host"], tiers["device"] = merged, dict.fromkeys(KINDS, 0)
    passing = {tier: plan.passing.get(tier, 0) * ranks for tier in TIERS}
    if not machine.gpus:
        passing["host"], passing["device"] = passing["host"] + passing["device"], 0
    available = {
        "device": machine.device_memory * machine.gpus,
        "host": machine.host_memory,
        "nvme": machine.nvme,
    }
    return Needs(tiers, peak, passing, available)


def advice(plan: Plan, needs: Needs) -> Iterator[str]:
    """Yield the changes with which the plan would fit, the smallest first."""
    for tier in needs.limits:
        missing = show_bytes(needs.missing(tier))
        extents = {kind: needs.tiers[tier][kind] for kind in KINDS}
        if tier == "nvme":
            yield f"nvme lacks {missing}: use a larger drive or more nodes{_smaller_moments(plan)}"
        elif tier == "host" and plan.budget.host is not None:
            yield f"host memory lacks {missing}: lower infinity.memory.host, which states and buffers fill"
        elif tier == "host" and (extents["params"] or extents["optimizer"]):
            yield f"host memory lacks {missing}: give offload_param and offload_optimizer the device nvme"
        elif tier == "device" and _held_by_budget(plan):
            yield f"device memory lacks {missing}: lower infinity.memory.device_optimizer, to 0 if it is not set"
        elif tier == "device" and (extents["params"] or extents["optimizer"]):
            yield f"device memory lacks {missing}: give offload_param and offload_optimizer the device cpu or nvme"
        elif extents["activations"] > extents["buffers"]:
            yield f"{tier} memory lacks {missing}: checkpoint activations, or use a smaller micro-batch"
        else:
            yield f"{tier} memory lacks {missing}: lower infinity.prefetch_bytes or infinity.unit_size"


def _held_by_budget(plan: Plan) -> bool:
    """Return whether a budget keeps states on the device that the config places elsewhere."""
    extents = plan.placement.extents.items()
    return any(extent.tier == "device" != plan.policy.tier_of(state) for (_, state), extent in extents)


def _smaller_moments(plan: Plan) -> str:
    return "" if plan.policy.states(plan.units[0].dtype).bytes_per_element <= 5 else ', or infinity.moments "8bit"'
