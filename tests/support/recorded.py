"""Transfers of a real run, recorded by its tiers in the order of their submission."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import repeat
from typing import Any, TypeAlias

import torch
from torch import nn

from infinity.activations.disk import NAME, DiskRoom
from infinity.activations.room import HostRoom
from infinity.activations.store import ActivationStore
from infinity.config import Config
from infinity.engine.platform import Platform
from infinity.engine.training import TrainingEngine
from infinity.grads.buffers import Sent
from infinity.observe.ledger import Snapshot
from infinity.plan.io import ActivationPlan
from infinity.plan.placement import Extent, aligned
from infinity.plan.plan import Plan
from infinity.sim.simulate import Simulation, largest_list
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier
from infinity.tiers.device import CpuDevice, Device
from infinity.tiers.durable import DurableFiles
from infinity.tiers.io import engine_of
from infinity.tiers.transfer import Transfer
from infinity.update.job import Gradient, PlacedUpdate

Order: TypeAlias = dict[tuple[str, str], list[tuple[str, int]]]
"""(thread, lane) → (extent, bytes) of its transfers, in order."""


LANES = "nvme_read", "nvme_write", "host_to_device", "device_to_host", "activations"


class RecordedDisk(DiskRoom):
    """A room on nvme that records its requests, and ends each transfer before the model continues."""

    order: Order
    held = peak = 0
    """Bytes of extents, as aligned in files."""

    def reserve(self, nbytes: int) -> Extent:
        extent = super().reserve(nbytes)
        self.held += aligned(nbytes)
        self.peak = max(self.peak, self.held)
        return extent

    def free(self, extent: Extent) -> None:
        self.held -= aligned(extent.nbytes)
        super().free(extent)

    def write(self, extent: Extent, source: torch.Tensor) -> Transfer:
        return _ended(super().write(extent, source))

    def read(self, extent: Extent, destination: torch.Tensor) -> Transfer:
        return _ended(super().read(extent, destination))

    def _read(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        return self._noted(f"read {NAME}", super()._read(extent, memory, offset))

    def _write(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        return self._noted(f"write {NAME}", super()._write(extent, memory, offset))

    def _noted(self, name: str, submitted: Any) -> Transfer:
        self.order[present_thread(), "activations"].append((name, submitted._request.nbytes))
        return _ended(submitted)


class RecordedHost(HostRoom):
    """A room in host memory that records its copies, and ends each before the model continues."""

    order: Order
    peak = 0

    def reserve(self, nbytes: int) -> Extent:
        extent = super().reserve(nbytes)
        self.peak = max(self.peak, self.nbytes)
        return extent

    def write(self, extent: Extent, source: torch.Tensor) -> Transfer:
        self.order[present_thread(), "activations"].append((extent.name, source.numel()))
        return _ended(super().write(extent, source))

    def read(self, extent: Extent, destination: torch.Tensor) -> Transfer:
        self.order[present_thread(), "activations"].append((extent.name, destination.numel()))
        return _ended(super().read(extent, destination))


def _ended(transfer: Transfer) -> Transfer:
    transfer.wait()
    return transfer


class Recorder(Platform):
    """This machine, whose tiers record what is submitted to them."""

    def __init__(self) -> None:
        self.order: Order = defaultdict(list)
        self.room: RecordedHost | RecordedDisk | None = None

    def open_tiers(
        self, plan: Plan, device: Device, rank: int, durable: DurableFiles | None = None
    ) -> dict[TierKind, Tier]:
        tiers = super().open_tiers(plan, device, rank, durable)
        for name, tier in tiers.items():
            lanes = {"read": "host_to_device", "fetch": "host_to_device", "write": "device_to_host"}
            if name == "nvme":
                lanes = {"_read": "nvme_read", "_write": "nvme_write"}
            for method, lane in lanes.items():
                if name != "device":
                    setattr(tier, method, self._recording(lane, getattr(tier, method)))
        return tiers

    def open_activations(self, plan: ActivationPlan | None, device: Device, rank: int) -> ActivationStore | None:
        if plan is None:
            return None
        io = plan.io
        self.room = RecordedHost(device) if io is None else RecordedDisk(io, engine_of(io), device, rank)
        self.room.order = self.order
        return ActivationStore(self.room, device, plan)

    def _recording(self, lane: str, transfer: Callable[..., Any]) -> Callable[..., Any]:
        def record(extent: Any, memory: torch.Tensor, *offset: int) -> Any:
            self.order[present_thread(), lane].append((extent.name, memory.numel()))
            submitted = transfer(extent, memory, *offset)
            submitted.wait()
            return submitted

        return record


def present_thread() -> str:
    """Return the calling thread's name, as in a simulation."""
    name = threading.current_thread().name
    return "model" if name in ("MainThread", "micro-batch") else name.partition("_")[0]


def real_run(
    model: nn.Module,
    config: Config,
    batch: Sequence[torch.Tensor],
    steps: int,
    device: Device | None = None,
    *,
    whole: bool = False,
) -> tuple[Order, Snapshot, dict[str, int]]:
    """Train `steps` steps, in vertical order if `whole`.

    Returns the transfers until the engine is closed, the counters of the run, and tier → peak bytes of saved
    activations there.
    """
    recorder = Recorder()
    engine = TrainingEngine(model, config, device=device or CpuDevice(), platform=recorder)
    recorder.order.clear()
    _finish_at_once(engine)
    before = engine.ledger.snapshot()
    for _ in range(steps):
        if whole:
            engine.train_batch(repeat(batch), blocks=largest_list(model))
            continue
        for _ in range(engine.batch.accumulation):
            engine.backward(engine(*batch))
            engine.step()
    engine.settle()
    moved = engine.ledger.snapshot() - before
    engine.close()
    room = recorder.room
    return dict(recorder.order), moved, {} if room is None else {room.kind: room.peak}


def _finish_at_once(engine: TrainingEngine) -> None:
    """Let the threads of updates and gradients finish what they are given before the model continues.

    So the order does not depend on the speeds of this machine.
    """
    pipeline, gradients = engine.updates.pipeline, engine.updates.gradients
    submit, keep, land = pipeline.submit, gradients.keep, gradients.land

    def submit_and_wait(placed: PlacedUpdate) -> None:
        submit(placed)
        placed.job.progress.done.wait()
        while pipeline._ended < pipeline._submitted:
            time.sleep(1e-4)

    def keep_and_wait(sent: Sent, *, lands: bool = False) -> Future[Gradient] | None:
        landed = keep(sent, lands=lands)
        # A gradient that an update reads is written in the update's time.
        if landed is not None:
            landed.result()
        elif (written := gradients._moves[-1].result()) is not None:
            written.result()
        return landed

    def land_and_wait(sent: Sent) -> Future[Gradient]:
        landed = land(sent)
        landed.result()
        return landed

    vars(pipeline)["submit"] = submit_and_wait
    vars(gradients).update(keep=keep_and_wait, land=land_and_wait)


def simulated_order(simulation: Simulation) -> Order:
    """Return the transfers between tiers of a whole simulation."""
    order: Order = defaultdict(list)
    for record in simulation.submitted:
        if record.name and record.lane in LANES:
            order[record.thread, record.lane].append((record.name, record.nbytes))
    return dict(order)


def bytes_of(order: Order, lane: str) -> int:
    return sum(nbytes for key, moves in order.items() if key[1] == lane for _, nbytes in moves)
