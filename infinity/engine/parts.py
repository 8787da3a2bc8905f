"""Dataclasses for the parts of an engine, built by `infinity.engine.wiring`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from infinity.activations.store import ActivationStore
from infinity.checkpoint.background import Saver
from infinity.comm.communicator import Communicator
from infinity.engine.durable import DurableSteps
from infinity.engine.profile import Profiler
from infinity.engine.runner import Runner
from infinity.engine.training_runner import TrainingRunner
from infinity.grads.collector import GradCollector
from infinity.grads.store import GradStore
from infinity.model.backward import BackwardTracker, ComingGradients
from infinity.plan.plan import Plan
from infinity.plan.shortage import spare
from infinity.schedule.schedule import Schedule
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.open_tiers import Pools
from infinity.tiers.passing import PassingSpace, PassingTier
from infinity.units.states import UnitStates
from infinity.units.store import UnitStore
from infinity.units.unit import Unit
from infinity.update.pipeline import UpdatePipeline


@dataclass(kw_only=True)
class UpdateParts:
    """Additional parts of a training engine: gradients, and the update of units."""

    runner: TrainingRunner
    collector: GradCollector
    gradients: GradStore
    pipeline: UpdatePipeline
    passing: PassingTier | PassingSpace | None
    """Memory or space of stored gradients that no tier reserves."""
    profiler: Profiler
    durable: DurableSteps | None = None
    """Commits of a durable run."""
    saver: Saver = field(default_factory=Saver)

    def closer(self, then: Callable[[], None]) -> Callable[[], None]:
        """Return a function that joins the threads of saves and updates, and then calls `then`."""
        saver, pipeline, gradients, profiler = self.saver, self.pipeline, self.gradients, self.profiler
        end_commits, unlock = (_nothing, _nothing) if self.durable is None else self.durable.closers()

        def release() -> None:
            with ExitStack() as closing:  # in reverse order, all of them after an error too
                for end in (unlock, then, gradients.close, pipeline.close):
                    closing.callback(end)
                closing.callback(end_commits)  # which wait for updates
                closing.callback(profiler.close)

        return lambda: saver.close(then=release)  # joins saves first: updates may wait for them


def _nothing() -> None:
    return None


def close_memory(device: Device, tiers: Iterable[Tier], activations: ActivationStore | None) -> None:
    """Close what holds an engine's bytes, all of it after an error too, and wait for the device's last copies."""
    with ExitStack() as closing:  # in reverse order
        closing.callback(device.lift_limit)
        # A fetch ahead that nothing used may be under way. What frees its buffers next does not wait for it.
        closing.callback(device.finish)
        for tier in tiers:
            closing.callback(tier.close)
        if activations is not None:
            closing.callback(activations.close)


@dataclass(kw_only=True)
class EngineParts:
    """Parts of every engine. training: None for inference."""

    plan: Plan
    device: Device
    ranks: Communicator
    tiers: Mapping[TierKind, Tier]
    activations: ActivationStore | None
    """Saved activations that leave the device; None: they stay."""
    pools: Pools
    schedule: Schedule
    store: UnitStore
    runner: Runner
    backward: BackwardTracker
    coming: ComingGradients
    units_of_module: dict[nn.Module, list[Unit]]
    unit_of: Mapping[int, Unit]
    """id(parameter) → unit."""
    states: UnitStates
    training: UpdateParts | None
    most_gathered: int = 0
    """Most bytes of a block of `GatheredParameters` beside the plan's buffers so far."""

    def note_gathered(self, nbytes: int) -> None:
        """Record the bytes of a block of `GatheredParameters` that exceeds those before."""
        self.most_gathered = nbytes

    @property
    def units(self) -> list[Unit]:
        return self.store.units

    def tier_bytes(self) -> dict[TierKind, int]:
        """Return tier → allocated bytes, pools included. `Plan.nbytes` returns the same before allocation, without
        gradients that are stored at present in `Plan.passing`, and saved activations.
        """
        held = {TierKind.DEVICE: 0, TierKind.HOST: self.ranks.nbytes, TierKind.NVME: 0}
        for kind, tier in self.tiers.items():
            held[kind] += tier.nbytes
            held[TierKind.HOST] += tier.staging_nbytes
        if self.activations is not None:
            room = self.activations.room
            held[room.kind] += room.nbytes
            held[TierKind.HOST] += room.staging_nbytes
        for kind in held:
            held[kind] += self.pools.nbytes(kind)
        passing = self.training.passing if self.training is not None else None
        if passing is not None:
            held[passing.kind] += passing.nbytes
        return held

    def spare(self) -> str:
        """Return a sentence on device memory that no step has taken so far; empty if no state could be kept there."""
        return spare(self.plan, self.device.unused_bytes(self.plan.device.limit))

    def counters(self) -> dict[str, Any]:
        """Return the bytes moved and the seconds of updates so far; see `infinity.observe.ledger.Snapshot`."""
        nvme, traffic, training = self.tiers.get(TierKind.NVME), self.ranks.traffic, self.training
        room = None if self.activations is None else self.activations.room
        return {
            "update_seconds": training.pipeline.seconds if training else 0.0,
            "nvme_bytes_read": getattr(nvme, "bytes_read", 0),
            "nvme_bytes_written": getattr(nvme, "bytes_written", 0),
            "activation_bytes_read": room.bytes_read if room else 0,
            "activation_bytes_written": room.bytes_written if room else 0,
            "all_gather_bytes": traffic.all_gather_bytes,
            "reduce_scatter_bytes": traffic.reduce_scatter_bytes,
            "updated_elements": training.pipeline.elements if training else 0,
            "fetches": self.store.fetches,
            "blocks_repaired": getattr(nvme, "blocks_repaired", 0) + (room.blocks_repaired if room else 0),
        }

    def free_memory(self) -> None:
        """Free the memory of tiers and pools of a closed engine, to which a script may still refer."""
        tiers = [*self.tiers.values()]
        if self.training is not None:
            self.training.pipeline.forget_buffers()
            if isinstance(self.training.passing, PassingTier):
                tiers.append(self.training.passing)
        for tier in tiers:
            tier.free_memory()
        for pool in self.pools:
            pool.dismiss()

    def closer(self) -> Callable[[], None]:
        """Return a function that releases threads, memory and disk. It holds no reference to model or engine."""
        close = partial(close_memory, self.device, list(self.tiers.values()), self.activations)
        return close if self.training is None else self.training.closer(then=close)
