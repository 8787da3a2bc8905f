"""From a model and a config to the parts that run it: lay out, place, allocate, stream the values in, wire up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.comm.agreement import in_common
from infinity.comm.collectives import Ranks
from infinity.comm.dtensor import is_distributed, local
from infinity.config import Config
from infinity.construction.materialize import Materializer, check_values, initial_states, make_buffers, read_shard
from infinity.construction.sources import source_of
from infinity.construction.spill import check_kept
from infinity.errors import OutOfMemoryError, RanksError
from infinity.plan.layout import UnitLayout
from infinity.plan.placement import Placement, Policy, checksum_block, place
from infinity.plan.policy import TIERS
from infinity.tiers.available import available_memory
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.files import open_swap_files
from infinity.tiers.io import open_engine
from infinity.tiers.memory import return_freed_memory
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.pool import Pool, size_classes
from infinity.tiers.slab import SlabTier
from infinity.tiers.stripe import stripe_chunk
from infinity.units.aliases import check_aliases
from infinity.units.backward import BackwardTracker
from infinity.units.binding import unbind
from infinity.units.discover import Discovered, modules_to_hook
from infinity.units.nesting import held_together
from infinity.units.saved import SavedTensors
from infinity.units.scope import Scope
from infinity.units.states import UnitStates
from infinity.units.store import UnitStore
from infinity.units.unit import Unit

# Units held at least: the one that computes, and its parent's.
_HELD = 2
_UPDATED = 1
_SMALL = 256 << 10
"""Bytes of all buffers together up to which a pool of small buffers has more of them."""
_STAYS = 16 << 20
"""Bytes of units that are not worth fetching again: the host takes longer for it than for their computation."""


@dataclass(kw_only=True)
class Parts:
    """What every engine is made of: enough to run a model."""

    device: Device
    ranks: Ranks
    policy: Policy
    placement: Placement
    tiers: dict[str, Tier]
    pools: Pools
    store: UnitStore
    backward: BackwardTracker
    units_of_module: dict[nn.Module, list[Unit]]
    unit_of: dict[int, Unit]
    states: UnitStates
    stage: int
    update: str | None = None
    """When units are updated; None: never."""

    @property
    def units(self) -> list[Unit]:
        return self.store.units

    def tier_bytes(self) -> dict[str, int]:
        """Bytes reserved in each tier, pools included."""
        held = dict.fromkeys(TIERS.values(), 0)
        for name, tier in self.tiers.items():
            held[name] += tier.nbytes
        held["host"] += self.ranks.nbytes
        for pool in self.pools:
            held["device" if pool in self.pools.on_device else "host"] += pool.nbytes
        return held

    def counters(self) -> dict[str, Any]:
        """What has been moved and waited for so far; see `infinity.observe.ledger.Snapshot`."""
        nvme = self.tiers.get("nvme")
        traffic = self.ranks.traffic
        return {
            "wait_seconds": self.store.wait_seconds,
            "update_seconds": 0.0,
            "nvme_bytes_read": getattr(nvme, "bytes_read", 0),
            "nvme_bytes_written": getattr(nvme, "bytes_written", 0),
            "all_gather_bytes": traffic.all_gather_bytes,
            "reduce_scatter_bytes": traffic.reduce_scatter_bytes,
            "updated_elements": 0,
            "fetches": self.store.fetches,
        }

    def closer(self) -> Callable[[], None]:
        """What gives back threads, memory and disk. It refers to neither model nor engine: it must not keep them."""
        tiers = list(self.tiers.values())

        def close() -> None:
            for tier in tiers:
                tier.close()

        return close


class Pools(list[Pool]):
    """The pools of one engine, whose buffers its tiers know of."""

    def __init__(self, device: Device, tiers: Iterable[Tier], *, debug: bool) -> None:
        super().__init__()
        self.on_device: list[Pool] = []
        self._device, self._tiers, self._debug = device, list(tiers), debug

    def in_flight(self, count: int, nbytes: int) -> int:
        """Buffers of `nbytes` for what needs `count` of large ones: up to four times as many small ones, whose copies
        take their time from latency. `infinity.debug` has no more than needed, so that buffers are reused soon.
        """
        return count if self._debug else max(count, min(4 * count, _SMALL // max(nbytes, 1)))

    def make(self, name: str, sizes: dict[int, int], *, on_device: bool) -> Pool:
        allocate = self._device.empty if on_device else self._device.host_buffer
        buffer = partial(_registered, allocate, self._device, self._tiers)
        made = Pool(buffer, sizes, name=name, poison=self._debug, fifo=self._debug)
        self.append(made)
        if on_device:
            self.on_device.append(made)
        return made


def _registered(
    allocate: Callable[[int], torch.Tensor], device: Device, tiers: Sequence[Tier], nbytes: int
) -> torch.Tensor:
    """A buffer that the tiers know of. Refers to no model: pools must not keep one."""
    memory = allocate(nbytes)
    if device.is_host(memory):
        for tier in tiers:
            tier.register(memory)
    return memory


def _check_memory(placement: Placement, device: Device) -> None:
    """Refuse what does not fit before a byte of it is allocated."""
    on_device, on_host = placement.nbytes.get("device", 0), placement.nbytes.get("host", 0)
    hint = "give offload_param or offload_optimizer the device cpu or nvme (zero_optimization), or use more ranks"
    if device.torch_device.type == "cpu":
        on_device, on_host = 0, on_device + on_host
        hint = "give offload_param or offload_optimizer the device nvme (zero_optimization), or use more ranks"
    for where, needed, available in (
        ("host memory", on_host, available_memory()),
        ("device memory", on_device, device.available_bytes()),
    ):
        if needed > available:
            raise OutOfMemoryError(where, needed, available, hint)


def _open_tiers(config: Config, placement: Placement, device: Device, ranks: Ranks) -> dict[str, Tier]:
    _check_memory(placement, device)
    opened: dict[str, Tier] = {}
    try:
        for name, nbytes in placement.nbytes.items():
            opened[name] = _open_tier(name, nbytes, placement.granule, config, device, ranks)
    except BaseException:
        for tier in opened.values():
            tier.close()
        raise
    return opened


def _open_tier(name: str, nbytes: int, granule: int, config: Config, device: Device, ranks: Ranks) -> Tier:
    zero = config.zero_optimization
    if name != "nvme":
        pin = any(part.pin_memory for part in (zero.offload_param, zero.offload_optimizer) if part.device == "cpu")
        return SlabTier(name, nbytes, device, on_device=name == "device", pin=pin)
    aio = config.aio
    chunk = stripe_chunk(aio.block_size)
    file = open_swap_files(zero.nvme_paths, nbytes, name=f"states of rank {ranks.rank}", chunk=chunk)
    try:
        threads = aio.threads * len(zero.nvme_paths)
        engine = open_engine(aio.engine, block_size=aio.block_size, queue_depth=aio.queue_depth, threads=threads)
    except BaseException:
        file.close()
        raise
    block = checksum_block(granule, aio.block_size, chunk) if aio.checksum else 0
    return NvmeTier(file, nbytes, engine, device, block)


def assemble(
    model: nn.Module,
    config: Config,
    found: Sequence[Discovered],
    layouts: Sequence[UnitLayout],
    rules: Policy,
    device: Device,
    ranks: Ranks,
    more_in_common: Sequence[str] = (),
) -> Parts:
    """Build what runs `model`, and move its values into their tiers. On an error nothing is left behind.

    more_in_common: lines besides `infinity.comm.agreement.in_common` that are the same on all ranks.
    """
    check_aliases(model)
    make_buffers(model)
    check_values(model)
    ranks.know(layouts)
    ranks.meet([*in_common(config, layouts, model), *more_in_common])
    placement = place(layouts, rules)
    tiers = _open_tiers(config, placement, device, ranks)
    try:
        return _Assembly(model, config, found, layouts, rules, placement, tiers, device, ranks).build()
    except BaseException:
        for tier in tiers.values():
            tier.close()
        raise


class _Assembly:
    """The steps of `assemble` that need most of its results."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        found: Sequence[Discovered],
        layouts: Sequence[UnitLayout],
        rules: Policy,
        placement: Placement,
        tiers: dict[str, Tier],
        device: Device,
        ranks: Ranks,
    ) -> None:
        self.model, self.config, self.found, self.layouts = model, config, list(found), layouts
        self.rules, self.placement, self.tiers = rules, placement, tiers
        self.device, self.ranks = device, ranks
        self.states = UnitStates(placement, tiers, rules.states, rules.tile_size, ranks, device)
        self.pools = Pools(device, tiers.values(), debug=config.infinity.debug)

    def build(self) -> Parts:
        self._stream_in()
        units = [
            Unit(layout, list(unit.parameters), self.device.torch_device)
            for unit, layout in zip(self.found, self.layouts, strict=True)
        ]
        for unit in units:
            unbind(unit)
        _share_buffers(self.model, self.ranks)
        _move_buffers(self.model, self.device.torch_device)
        unit_of = {id(p): unit for unit in units for p in unit.parameters}
        index_of = {key: unit.index for key, unit in unit_of.items()}
        hooked = modules_to_hook(self.model, index_of, [unit.root for unit in self.found])
        prefetch, unit_buffers = self._reach(hooked)
        unit_pool = self.pools.make("units", unit_buffers, on_device=True)
        param_tier = self.tiers[self.rules.param_tier]
        backward = BackwardTracker()
        scope = Scope(SavedTensors(backward.notice))
        store = UnitStore(units, unit_pool, param_tier, self.placement, self.device, self.ranks, prefetch, scope)
        store.adopt = self.states.adopt
        return Parts(
            device=self.device,
            ranks=self.ranks,
            policy=self.rules,
            placement=self.placement,
            tiers=self.tiers,
            pools=self.pools,
            store=store,
            backward=backward,
            units_of_module={module: [units[i] for i in indices] for module, indices in hooked.items()},
            unit_of=unit_of,
            states=self.states,
            stage=self.config.zero_optimization.stage,
        )

    def _reach(self, hooked: Mapping[nn.Module, Sequence[int]]) -> tuple[int, dict[int, int]]:
        """Return the bytes of units to fetch ahead, and device buffers as size → count. Buffers suffice for the units
        that nested modules hold at once, those fetched ahead or cached, and one whose update is being written.
        """
        sizes = [layout.nbytes for layout in self.layouts]
        if self.rules.resident:
            return sum(sizes), size_classes(sizes, len(sizes))
        largest = max(sizes)
        asked = self.config.infinity.prefetch_bytes
        prefetch = 4 * largest if asked == "auto" else int(asked)
        cached = self._cached_bytes(largest) // largest
        beside = math.ceil(prefetch / largest) + cached + _UPDATED
        together = [[sizes[unit] for unit in units] for units in held_together(self.model, hooked)]
        return prefetch, size_classes(sizes, _HELD + beside, together, beside)

    def _cached_bytes(self, largest: int) -> int:
        """Bytes of units that stay resident: `infinity.cache_bytes`."""
        asked = self.config.infinity.cache_bytes
        if asked != "auto":
            return int(asked)
        whole = largest * len(self.layouts)
        return whole if whole <= _STAYS else 0

    def _stream_in(self) -> None:
        self._check_sources()
        values = Materializer(self.model, {unit.root for unit in self.found})
        for number, (unit, layout) in enumerate(zip(self.found, self.layouts, strict=True)):
            sources = [source_of(parameter) for parameter in unit.parameters]
            parameters = values.materialize(unit.root, unit.parameters)
            self.found[number] = replace(unit, parameters=parameters)
            held = [
                None if source is not None else local(p).data for p, source in zip(parameters, sources, strict=True)
            ]
            flats = initial_states(layout, held)
            for flat in flats.values():
                if None in sources:
                    self.ranks.broadcast(flat)
                read_shard(layout, flat, sources, self.ranks.shard_rank)
            self.states.write(layout, flats)
            unbind(Unit(layout, list(parameters), self.device.torch_device))
            return_freed_memory()
        check_kept(self.model)

    def _check_sources(self) -> None:
        """Ranks must agree on what is read and what rank 0 sends."""
        mine = float(sum(source_of(p) is not None for unit in self.found for p in unit.parameters))
        total, squares = self.ranks.sums(mine, mine**2)
        if total**2 != self.ranks.size * squares:
            raise RanksError("ranks load different pretrained parameters: call load_pretrained alike on every rank")


def _share_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Ranks begin with the buffers of the first, as with its parameters. From then on each keeps its own."""
    if ranks.alone:
        return
    for buffer in model.buffers():
        if not is_distributed(buffer) and buffer.numel():
            whole = buffer.detach().contiguous().cpu().clone()
            ranks.broadcast(whole.view(-1).view(torch.uint8))
            if ranks.rank and not torch.equal(whole, buffer.cpu()):
                with torch.no_grad():
                    buffer.copy_(whole)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
