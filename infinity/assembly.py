"""From a model and a config to the parts of an engine: discover, lay out, place, allocate, stream the values in,
wire up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.comm.collectives import Ranks
from infinity.config import Config
from infinity.errors import OutOfMemoryError, RanksError
from infinity.optim.grad_store import GradPlaces, GradStore
from infinity.optim.grads import GradCollector
from infinity.optim.kernels import check_on_device, update_run
from infinity.optim.update import Places, UpdatePipeline
from infinity.policy import TIERS, lay_out, policy, update_schedule
from infinity.tiers.available import available_memory
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.files import open_swap_files
from infinity.tiers.io import open_engine
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.placement import Placement, Policy, State, checksum_block, place, tiles
from infinity.tiers.pool import Pool, size_classes
from infinity.tiers.slab import SlabTier
from infinity.tiers.stripe import stripe_chunk
from infinity.units.discover import Discovered, modules_to_hook
from infinity.units.init import Materializer, check_values, initial_states, make_buffers, read_shard
from infinity.units.layout import UnitLayout
from infinity.units.sources import source_of
from infinity.units.states import UnitStates
from infinity.units.store import UnitStore
from infinity.units.unit import Unit

# Besides what is fetched ahead: the unit that computes, its parent's and one whose update is being written.
_UNITS_BESIDE_PREFETCH = 3
_GRADIENTS_AT_ONCE = 4
_READS_AHEAD = 3
_TILE_BUFFERS = 2 * _READS_AHEAD


@dataclass
class Parts:
    """Everything an engine is made of."""

    device: Device
    ranks: Ranks
    policy: Policy
    placement: Placement
    tiers: dict[str, Tier]
    pools: list[Pool]
    device_pools: list[Pool]
    store: UnitStore
    collector: GradCollector
    gradients: GradStore
    pipeline: UpdatePipeline
    units_of_module: dict[nn.Module, list[Unit]]
    unit_of: dict[int, Unit]
    states: UnitStates
    update: str
    stage: int

    @property
    def units(self) -> list[Unit]:
        return self.store.units

    def tier_bytes(self) -> dict[str, int]:
        """Bytes reserved in each tier, pools included."""
        held = dict.fromkeys(TIERS.values(), 0)
        for name, tier in self.tiers.items():
            held[name] += tier.nbytes
        for pool in self.pools:
            held["device" if pool in self.device_pools else "host"] += pool.nbytes
        return held

    def counters(self) -> dict[str, Any]:
        """What has been moved and waited for so far; see `infinity.observe.ledger.Snapshot`."""
        nvme = self.tiers.get("nvme")
        traffic = self.ranks.traffic
        return {
            "wait_seconds": self.store.wait_seconds + self.collector.wait_seconds,
            "update_seconds": self.pipeline.seconds,
            "nvme_bytes_read": getattr(nvme, "bytes_read", 0),
            "nvme_bytes_written": getattr(nvme, "bytes_written", 0),
            "all_gather_bytes": traffic.all_gather_bytes,
            "reduce_scatter_bytes": traffic.reduce_scatter_bytes,
            "updated_elements": self.pipeline.elements,
            "fetches": self.store.fetches,
        }

    def closer(self) -> Callable[[], None]:
        """What gives back threads, memory and disk. It refers to neither model nor engine: it must not keep them."""
        pipeline, gradients, tiers = self.pipeline, self.gradients, list(self.tiers.values())

        def close() -> None:
            pipeline.close()
            gradients.close()
            for tier in tiers:
                tier.close()

        return close


def _check_memory(placement: Placement, device: Device) -> None:
    """Refuse what does not fit before a byte of it is allocated."""
    on_device, on_host = placement.nbytes.get("device", 0), placement.nbytes.get("host", 0)
    hint = "give offload_param or offload_optimizer the device cpu or nvme (zero_optimization), or use more ranks"
    if device.torch_device.type == "cpu":
        on_device, on_host = 0, on_device + on_host
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
    groups: Sequence[dict[str, object]],
    device: Device,
    ranks: Ranks,
    accumulation: int,
) -> Parts:
    """Build every part for `model` and move its values into their tiers. On an error nothing is left behind."""
    found, layouts = lay_out(model, config, groups, ranks.shards)
    make_buffers(model)
    check_values(model)
    ranks.know(layouts)
    rules = policy(config, accumulation, ranks)
    if rules.optim_tier == "device" and device.torch_device.type == "cuda":
        check_on_device(config.optimizer.rule, config.infinity.moments)
    placement = place(layouts, rules)
    tiers = _open_tiers(config, placement, device, ranks)
    try:
        return _Assembly(model, config, found, layouts, rules, placement, tiers, device, ranks).build()
    except BaseException:
        for tier in tiers.values():
            tier.close()
        raise


def _registered(
    allocate: Callable[[int], torch.Tensor], device: Device, tiers: Sequence[Tier], nbytes: int
) -> torch.Tensor:
    """A buffer that the tiers know of. Refers to no model: pools must not keep one."""
    memory = allocate(nbytes)
    if device.is_host(memory):
        for tier in tiers:
            tier.register(memory)
    return memory


class _Assembly:
    """The steps of `assemble` that need most of its results."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        found: list[Discovered],
        layouts: list[UnitLayout],
        rules: Policy,
        placement: Placement,
        tiers: dict[str, Tier],
        device: Device,
        ranks: Ranks,
    ) -> None:
        self.model, self.config, self.found, self.layouts = model, config, found, layouts
        self.rules, self.placement, self.tiers = rules, placement, tiers
        self.device, self.ranks = device, ranks
        self.states = UnitStates(placement, tiers, rules.states, rules.tile_size, ranks, device)
        self.pools: list[Pool] = []
        self.device_pools: list[Pool] = []

    def pool(self, name: str, sizes: dict[int, int], *, on_device: bool) -> Pool:
        debug = self.config.infinity.debug
        allocate = self.device.empty if on_device else self.device.host_buffer
        make = partial(_registered, allocate, self.device, list(self.tiers.values()))
        made = Pool(make, sizes, name=name, poison=debug, fifo=debug)
        self.pools.append(made)
        if on_device:
            self.device_pools.append(made)
        return made

    def build(self) -> Parts:
        self._stream_in()
        units = [
            Unit(layout, list(unit.parameters), self.device.torch_device)
            for unit, layout in zip(self.found, self.layouts, strict=True)
        ]
        for unit in units:
            unit.unbind()
        _move_buffers(self.model, self.device.torch_device)
        prefetch, depth = self._reach()
        unit_pool = self.pool("units", size_classes([x.nbytes for x in self.layouts], depth), on_device=True)
        param_tier = self.tiers[self.rules.param_tier]
        store = UnitStore(units, unit_pool, param_tier, self.placement, self.device, self.ranks, prefetch)
        places = self._grad_places()
        gradients = GradStore(self.ranks, places)
        collector = GradCollector(units, self.ranks, places, gradients)
        pipeline = UpdatePipeline(
            self._update_places(),
            partial(update_run, seed=self.config.infinity.seed, threads=self.config.infinity.adam_threads),
            reads_ahead=_READS_AHEAD,
        )
        store.pipeline = pipeline
        store.adopt = self.states.adopt
        store.on_move = collector.moved_on
        unit_of = {id(p): unit for unit in units for p in unit.parameters}
        index_of = {key: unit.index for key, unit in unit_of.items()}
        hooked = modules_to_hook(self.model, index_of, [unit.root for unit in self.found])
        return Parts(
            device=self.device,
            ranks=self.ranks,
            policy=self.rules,
            placement=self.placement,
            tiers=self.tiers,
            pools=self.pools,
            device_pools=self.device_pools,
            store=store,
            collector=collector,
            gradients=gradients,
            pipeline=pipeline,
            units_of_module={module: [units[i] for i in indices] for module, indices in hooked.items()},
            unit_of=unit_of,
            states=self.states,
            update=update_schedule(self.config),
            stage=self.config.zero_optimization.stage,
        )

    def _reach(self) -> tuple[int, int]:
        """Bytes of units that are fetched ahead, and how many units are in device buffers at once."""
        if self.rules.resident:
            return sum(layout.nbytes for layout in self.layouts), len(self.layouts)
        largest = max(layout.nbytes for layout in self.layouts)
        asked = self.config.infinity.prefetch_bytes
        prefetch = 4 * largest if asked == "auto" else int(asked)
        return prefetch, math.ceil(prefetch / largest) + _UNITS_BESIDE_PREFETCH

    def _stream_in(self) -> None:
        self._check_sources()
        values = Materializer(self.model, {unit.root for unit in self.found})
        for number, (unit, layout) in enumerate(zip(self.found, self.layouts, strict=True)):
            sources = [source_of(parameter) for parameter in unit.parameters]
            parameters = values.materialize(unit.root, unit.parameters)
            self.found[number] = replace(unit, parameters=parameters)
            flats = initial_states(
                layout, [p.data if source is None else None for p, source in zip(parameters, sources, strict=True)]
            )
            for flat in flats.values():
                if None in sources:
                    self.ranks.broadcast(flat)
                read_shard(layout, flat, sources, self.ranks.shard_rank)
            self.states.write(layout, flats)
            Unit(layout, list(parameters), self.device.torch_device).unbind()

    def _check_sources(self) -> None:
        """Ranks must agree on what is read and what rank 0 sends."""
        mine = float(sum(source_of(p) is not None for unit in self.found for p in unit.parameters))
        total, squares = self.ranks.sums(mine, mine**2)
        if total**2 != self.ranks.size * squares:
            raise RanksError("ranks load different pretrained parameters: call load_pretrained alike on every rank")

    def _grad_places(self) -> GradPlaces:
        trainable = [layout for layout in self.layouts if layout.trainable]
        sizes = [layout.numel * (self.rules.grad_dtype or layout.dtype).itemsize for layout in trainable]
        shards = [size // self.ranks.shards for size in sizes]
        tier = self.tiers[self.rules.optim_tier]
        at_once = len(trainable) if self.rules.grads_whole else _GRADIENTS_AT_ONCE
        host_pool = None
        if not self.device.host_addressable and not tier.on_device:
            host_pool = self.pool("gradient shards", size_classes(shards, _GRADIENTS_AT_ONCE), on_device=False)
        return GradPlaces(
            device=self.device,
            tier=tier,
            placement=self.placement,
            dtype=self.rules.grad_dtype,
            pool=self.pool("gradients", size_classes(sizes, at_once), on_device=True),
            host_pool=host_pool,
            stored_pool=self.pool("stored gradient", {max(shards): 1}, on_device=tier.on_device),
            whole=self.rules.grads_whole,
            threads=self.config.infinity.adam_threads,
        )

    def _update_places(self) -> Places:
        trainable = [layout for layout in self.layouts if layout.trainable]
        tier = self.tiers[self.rules.optim_tier]
        tile_size, formats = self.rules.tile_size, self.rules.states
        state_bytes = max(tiles(x.shard_numel, tile_size, formats(x.dtype))[0].nbytes for x in trainable)
        grad_bytes = max(min(x.shard_numel, tile_size) * (self.rules.grad_dtype or x.dtype).itemsize for x in trainable)
        count = _TILE_BUFFERS if tier.name == "nvme" else 0
        staged = not self.device.host_addressable and not tier.on_device
        largest_shard = max(x.shard_nbytes for x in trainable)
        placement = self.placement  # the thread of the update must not keep the model alive
        return Places(
            device=self.device,
            param_tier=self.tiers[self.rules.param_tier],
            optim_tier=tier,
            grad_tier=tier,
            param_extent=lambda unit: placement.of(unit, State.PARAM),
            optim_extent=lambda unit: placement.of(unit, State.OPTIM),
            grad_extent=lambda unit: placement.of(unit, State.GRAD),
            formats=formats,
            tile_size=tile_size,
            tile_pool=self.pool("tiles", {state_bytes: count} if count else {}, on_device=False),
            grad_tile_pool=self.pool("gradient tiles", {grad_bytes: count} if count else {}, on_device=False),
            param_pool=self.pool("parameter shards", {largest_shard: 2}, on_device=False) if staged else None,
            grad_dtype=self.rules.grad_dtype,
        )


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
