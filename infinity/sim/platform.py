"""The platform of a simulated engine: ranks, tiers and kernels in virtual time, and no values.

Extents are on the meta device, and transfers take time. Kernels compute nothing, and take the time of the bytes that
they access or a measured one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.activations.store import ActivationStore
from infinity.comm.communicator import Communicator
from infinity.comm.groups import Group
from infinity.construction.stream_in import move_buffers
from infinity.durable.run import DurableRun
from infinity.engine.platform import Platform
from infinity.errors import UpdateError
from infinity.optim import cpu_adam
from infinity.plan.io import ActivationPlan
from infinity.plan.layout import UnitLayout
from infinity.plan.placement import Extent, TileLayout
from infinity.plan.plan import Plan
from infinity.plan.pools import READ_AHEAD
from infinity.rules import MomentFormat, RuleName
from infinity.sim.activations import SimulatedRoom, open_simulated_room
from infinity.sim.clock import BACKGROUND, FOREGROUND, Clock
from infinity.sim.compute import Compute
from infinity.sim.device import SimulatedDevice
from infinity.sim.lanes import Drive, DriveEngine, measured
from infinity.sim.machine import Links
from infinity.sim.ranks import Ranks, SimulatedCommunicator
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.durable import DurableFiles
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.slab import SlabTier
from infinity.tiers.transfer import Transfer
from infinity.units.binding import unbind
from infinity.units.discover import UnitParameters
from infinity.units.states import UnitStates
from infinity.units.unit import Unit
from infinity.update import kernels, whole
from infinity.update.kernels import Kernels

if TYPE_CHECKING:
    from infinity.config import Config


class SimulatedPlatform(Platform):
    """A platform on one clock."""

    def __init__(
        self, clock: Clock, device: SimulatedDevice, compute: Compute, links: Links, ranks: Ranks, free_nvme: int
    ) -> None:
        """compute: of the model's thread. free_nvme: bytes for a rank's states."""
        self._free_nvme = free_nvme
        self.kernels = simulated_kernels(device)
        self._clock = clock
        self._device = device
        self._compute = compute
        self._ranks = ranks
        self._collective = links.collective
        self.room: SimulatedRoom | None = None
        """That of saved activations, if they leave the device."""
        self._drive: Drive | None = None
        if links.nvme_read is not None and links.nvme_write is not None:
            mixed = links.nvme_mixed or (links.nvme_read + links.nvme_write) / 2
            self._drive = Drive(clock, *(rate / ranks.per_node for rate in (links.nvme_read, links.nvme_write, mixed)))

    def communicator(self, device: Device, *, sharded: bool, group: Group | None, rank_timeout: float) -> Communicator:
        return SimulatedCommunicator(self._clock, self._device, self._ranks, self._collective, sharded=sharded)

    def prepare(self, model: nn.Module) -> None:
        """Values are not needed."""

    def striped(self, plan: Plan, config: Config, ranks: Communicator) -> Plan:
        return plan  # the bandwidths are of all folders together

    def free_on_each(self, folders: list[str]) -> int:
        return self._free_nvme

    def available(self, device: Device) -> dict[TierKind, int] | None:
        return None  # the machine that is simulated is not this one

    def open_run(self, plan: Plan, config: Config, ranks: Communicator) -> DurableRun | None:
        return None  # a commit moves no bytes but those of states in memory

    def open_tiers(
        self, plan: Plan, device: Device, rank: int, durable: DurableFiles | None = None
    ) -> dict[TierKind, Tier]:
        return open_simulated(plan, device, self._clock, self._drive)

    def open_activations(self, plan: ActivationPlan | None, device: Device, rank: int) -> ActivationStore | None:
        if plan is None:
            return None
        self.room = open_simulated_room(plan, device, self._clock, self._drive, self._compute.count)
        return ActivationStore(self.room, device, plan)

    def stream_in(
        self,
        model: nn.Module,
        found: Sequence[UnitParameters],
        layouts: Sequence[UnitLayout],
        states: UnitStates,
        ranks: Communicator,
        device: torch.device,
    ) -> list[Unit]:
        move_buffers(model, device)
        units = []
        for members, layout in zip(found, layouts, strict=True):
            units.append(Unit(layout, list(members.parameters), device, members.wrappers))
            unbind(units[-1])
        return units


_INLINE = 65_536
"""Elements below which the calling thread works alone (kInline in csrc/adam/adam.cpp)."""
_receive = partial(kernels.receive, add=False, at=0)
_receive_add = partial(kernels.receive, add=True, at=0)


def simulated_kernels(device: SimulatedDevice) -> Kernels:
    """Return the kernels for states and gradients on `device` and on the host."""

    def update_run(
        states: dict[str, torch.Tensor], param: torch.Tensor, grad: torch.Tensor, *rest: Any, **more: Any
    ) -> None:
        # States are read and written, gradients read. Parameters beside fp32 masters are only written.
        moved = 2 * sum(state.nbytes for state in states.values()) + grad.nbytes + param.nbytes
        moved += 0 if "master" in states else param.nbytes
        if more.get("before") is not None:  # a draft: it reads the lines of 8-bit codes that it writes
            moved += sum(state.nbytes for state in states.values() if state.dtype is torch.uint8)
        pool = BACKGROUND if more.get("background") else FOREGROUND
        work("update", moved, param, kernels.update_run, states, param, grad, *rest, pool=pool)

    def update_whole(
        layout: UnitLayout, tile: TileLayout, runs: Any, hypers: Any, param: Any, records: torch.Tensor, *rest: Any
    ) -> int:
        try:  # torch's operations take their time
            return whole.update_whole(layout, tile, runs, hypers, param, records, *rest)
        except UpdateError:  # the class reads a value, and there is none
            elements = tile.tile.stop - tile.tile.start
            moved = 2 * (records.nbytes + elements * param.itemsize) + elements * rest[0].itemsize
            work("update", moved, records, torch.clone, records)
            return elements

    def receive(target: torch.Tensor, source: torch.Tensor, *, add: bool, initial: float = 0.0, **more: Any) -> float:
        moved = source.nbytes + (2 if add else 1) * source.numel() * target.itemsize
        kernel = _receive_add if add else _receive
        work("reduce", moved, target, kernel, target.flatten()[: source.numel()], source)
        return initial  # no gradient is so large that it is clipped

    def sum_of_squares(values: torch.Tensor, *, initial: float = 0.0, **more: Any) -> float:
        work("reduce", values.nbytes, values, cpu_adam.sum_of_squares, values)
        return initial  # no gradient is so large that it is clipped

    def squares_into(out: torch.Tensor, values: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        work("reduce", values.nbytes, values, cpu_adam.sum_of_squares, values)

    def check_on_device(device_type: str, rule: RuleName, moments: MomentFormat) -> None:
        """The native kernels exist on every simulated device."""

    def work(
        lane: str, nbytes: int, memory: torch.Tensor, kernel: Callable[..., Any], *args: Any, pool: str = FOREGROUND
    ) -> None:
        if device.is_host(memory):
            pool = pool if memory.numel() >= _INLINE else ""
            device.work_on_host(lane, device.host_seconds(nbytes, kernel, *args), pool)
        else:
            device.operate(0.0, nbytes)

    return Kernels(
        update_run, update_whole, receive, sum_of_squares, squares_into, check_on_device, is_exact=lambda kind: True
    )


def open_simulated(plan: Plan, device: Device, clock: Clock, drive: Drive | None) -> dict[TierKind, Tier]:
    """Return kind → tier, for the tiers that hold extents."""
    return {
        kind: SimulatedSlab(kind, plan, device, clock)
        if kind.in_memory
        else SimulatedNvme(plan, device, measured(drive, "states"))
        for kind in sorted(plan.placement.nbytes, key=lambda kind: kind.in_memory)
    }


class SimulatedSlab(SlabTier):
    """The engine's slab, whose copies carry the names of extents."""

    def __init__(self, kind: TierKind, plan: Plan, device: Device, clock: Clock) -> None:
        super().__init__(kind, plan.placement.nbytes[kind], device, spares=plan.placement.spares_in(kind))
        self._clock = clock

    def read(self, extent: Extent, destination: torch.Tensor, offset: int = 0) -> Transfer:
        with self._clock.naming(extent.name):
            return super().read(extent, destination, offset)

    def fetch(self, extent: Extent, destination: torch.Tensor) -> Transfer:
        with self._clock.naming(extent.name):
            return super().fetch(extent, destination)

    def write(self, extent: Extent, source: torch.Tensor, offset: int = 0) -> Transfer:
        with self._clock.naming(extent.name):
            return super().write(extent, source, offset)


class SimulatedNvme(NvmeTier):
    """The engine's nvme tier over a simulated drive. It counts bytes as the native I/O engine does."""

    def __init__(self, plan: Plan, device: Device, drive: Drive) -> None:
        assert plan.io is not None
        self._requests = DriveEngine(drive)
        parts: Any = self._requests  # in place of a file and of the native engine
        spares = plan.placement.spares_in(TierKind.NVME)
        super().__init__(parts, plan.io.reserved, parts, device, 0, plan.buffers_of(READ_AHEAD), spares)

    @property
    def blocks_repaired(self) -> int:
        return 0

    def release_space(self, extent: Extent) -> bool:
        return True

    def reserve_space(self, extent: Extent) -> None:
        """Space is not limited."""

    def _read(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        return self._requests.read(extent.name, memory.numel())

    def _write(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        return self._requests.write(extent.name, memory.numel())
