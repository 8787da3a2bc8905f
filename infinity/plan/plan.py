"""The plan of an engine: every layout, extent, pool and setting, known before a byte is allocated.

`make_plan` is pure. `infinity.engine.wiring` builds an engine from a plan, and `infinity.engine.describe` prints one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from infinity.plan.budget import Budget, Faster, fill, on_device
from infinity.plan.drafts import Drafts, choose_drafts
from infinity.plan.frozen import CODED_DTYPES, FrozenCode, FrozenFormat
from infinity.plan.io import ActivationPlan, IoPlan, plan_activations, plan_io
from infinity.plan.layout import Discovered, NormOf, UnitLayout, layout_unit
from infinity.plan.placement import Placement, Policy, State, aligned, place
from infinity.plan.policy import (
    DeviceInfo,
    RankInfo,
    UpdateSchedule,
    compute_dtype,
    frozen_format,
    holds_sums,
    policy,
    speculates,
    trained_dtype,
    update_schedule,
    updated_in_forward,
    used_in_place,
    written_late,
)
from infinity.plan.pools import (
    ACTIVATIONS,
    COLLECTIVES,
    READ_AHEAD,
    STAGING,
    PoolSpec,
    cached_bytes,
    exchange_pool,
    gradient_pools,
    least_unit_bytes,
    staging_pools,
    unit_pool,
    update_pools,
)
from infinity.plan.windows import RecordsFormat
from infinity.tier_kind import TierKind

if TYPE_CHECKING:
    from infinity.config import Config


@dataclass(frozen=True)
class Plan:
    """Layouts, places and buffers of one rank's states. An engine executes it; no other code sets a size."""

    units: tuple[UnitLayout, ...]
    policy: Policy
    placement: Placement
    update: UpdateSchedule | None
    """When units are updated; None: never, since the engine is for inference."""
    in_forward: frozenset[int]
    """Units that `during_backward` leaves to the next forward (`infinity.forward_updates`)."""
    drafted: frozenset[int]
    """Units whose updates may be drafts (`infinity.speculate`)."""
    in_place: frozenset[int]
    """Units that the model uses in their extent, without a buffer."""
    written_late: frozenset[int]
    """Units whose parameters are written to their tier as they leave their buffer, and not with each update."""
    pools: tuple[PoolSpec, ...]
    prefetch_bytes: int
    """Bytes of units to fetch ahead of the one in use."""
    cached_bytes: int
    """Bytes of units that stay after their use."""
    least_unit_bytes: int
    """Bytes of the buffers of units without those for units ahead and cached."""
    io: IoPlan | None
    """None: no state lives on nvme."""
    activations: ActivationPlan | None
    """None: tensors that autograd saves stay where they are computed."""
    ranks: RankInfo
    device: DeviceInfo
    budget: Budget
    stage: int
    accumulation: int
    """Micro-batches of a step, unless the user ends steps (`managed_accumulation`)."""
    managed_accumulation: bool
    """False: every `engine.step()` updates."""
    sums: bool
    """True if gradients of any number of micro-batches can be summed in `data_types.grad_accum_dtype`."""
    grad_divisor: int
    """Divisor of the sum of gradients over ranks: their number for the mean, 1 for the sum."""
    pin_memory: bool
    """Pin the parts of the host tier that a CUDA device copies (`pinned`), for asynchronous copies."""
    seed: int
    """Seed of stochastic rounding."""
    adam_threads: int
    """Threads of the CPU Adam; 0: one per processor that the process may use."""
    check_nan: bool
    """Skip units with a non-finite gradient in updates during backward."""
    step_nbytes: int
    """Bytes of the device that an update by a rule in Python takes, as the tensors of the optimizer's class."""
    debug: bool
    """Poison released buffers, and reuse each as late as possible."""

    def nbytes(self) -> dict[TierKind, int]:
        """Return tier → bytes that the engine allocates for its whole life: extents and pools.

        Room for saved activations is not counted: it is added while the model runs.
        """
        held = {**dict.fromkeys(TierKind, 0), **self.placement.nbytes}
        if self.io is not None:
            held[TierKind.NVME] = self.io.reserved
        for pool in self.pools:
            held[pool.tier] += pool.nbytes
        return held

    @property
    def drafted_share(self) -> float:
        """Return the share of the trained elements whose updates may be drafts."""
        trained = [layout for layout in self.units if layout.trainable]
        drafted = sum(layout.numel for layout in trained if layout.index in self.drafted)
        return drafted / max(1, sum(layout.numel for layout in trained))

    @property
    def passing(self) -> Mapping[TierKind, int]:
        """Tier → bytes that gradients may take beside `nbytes`: all of them in the first three steps, and later those
        of units that cannot be updated as backward leaves them, or are `in_forward`. On nvme all are reserved at start.
        """
        return self.placement.passing if self.update is not None else {}

    def peak_nbytes(self) -> dict[TierKind, int]:
        """Return tier → bytes that must be available: `nbytes`, `passing` and, on the device, `step_nbytes`."""
        peak = {tier: nbytes + self.passing.get(tier, 0) for tier, nbytes in self.nbytes().items()}
        return {**peak, TierKind.DEVICE: peak[TierKind.DEVICE] + self.step_nbytes}

    def peak_of_host(self) -> int:
        """Return the peak of host memory, which includes the device's buffers if the host computes."""
        peak = self.peak_nbytes()
        return sum(nbytes for tier, nbytes in peak.items() if self.in_host_memory(tier))

    def in_host_memory(self, tier: TierKind) -> bool:
        """Return whether a tier is memory of the host, as that of a device is if the host computes."""
        return tier.in_host_memory or (tier.on_device and self.device.type == "cpu")

    @property
    def own_pools(self) -> list[PoolSpec]:
        """Pools that the engine allocates. The files on nvme and the communicator allocate theirs themselves."""
        return [pool for pool in self.pools if pool.name not in (STAGING, READ_AHEAD, COLLECTIVES, ACTIVATIONS)]

    def pinned(self, tier: TierKind) -> list[tuple[int, int]]:
        """Return bytes [start, stop) of a tier that the device copies: parameters, and gradients stored in place.

        Empty if it is not host memory, or is not to be pinned. Optimizer states in host memory never leave it.
        """
        if not tier.in_host_memory or self.device.host_addressable or not self.pin_memory:
            return []
        states = (State.PARAM,) if self.policy.grads_pass else (State.PARAM, State.GRAD)
        found = [
            (extent.offset, extent.offset + aligned(extent.nbytes))
            for extents in (self.placement.extents, self.placement.spares)
            for (_, state), extent in extents.items()
            if state in states and extent.tier == tier
        ]
        return sorted(found)

    @property
    def updates_beside_compute(self) -> bool:
        """True if updates overlap with the model's operations on the same processors."""
        return self.device.type == "cpu" and self.update in ("during_backward", "next_forward")

    def buffers(self, pool: str) -> int:
        """Return the number of buffers in a pool; 0 if there is none."""
        return sum(self.buffers_of(pool).values())

    def buffer_bytes(self, pool: str) -> int:
        """Return the bytes of a pool; 0 if there is none."""
        return sum(size * count for size, count in self.buffers_of(pool).items())

    def buffers_of(self, pool: str) -> Mapping[int, int]:
        """Return the buffers of a pool, bytes → count; empty if there is none."""
        return next((spec.sizes for spec in self.pools if spec.name == pool), {})


def make_plan(
    config: Config,
    discovered: Discovered,
    ranks: RankInfo,
    device: DeviceInfo,
    *,
    budget: Budget | None = None,
    train: bool = True,
    dtype: torch.dtype | None = None,
) -> Plan:
    """Plan an engine for a discovered model.

    budget: memory that states fill before slower tiers; None: states are where the config places them. train: plan
    gradients and updates; otherwise parameters only. dtype: dtype of all floating parameters, instead of the config's.
    Raises ModelError for dtypes that cannot be trained.
    """
    layouts = lay_out(
        discovered,
        dtype or compute_dtype(config),
        ranks.shards,
        norm_of=config.infinity.norm_of,
        frozen=frozen_format(config),
    )
    accumulation = config.resolve_batch(ranks.size).accumulation if train else 1
    rules = policy(config, accumulation, ranks, device)
    budget = budget or Budget()
    zero = config.zero_optimization
    pinned = ("cpu",) if budget.host is None and budget.params is None else ("cpu", "nvme")
    bare = Plan(
        units=layouts,
        policy=rules,
        placement=place([], rules),
        update=update_schedule(config) if train else None,
        in_forward=updated_in_forward(layouts, config.infinity.forward_updates) if train else frozenset(),
        drafted=frozenset(),
        in_place=frozenset(),
        written_late=frozenset(),
        pools=(),
        prefetch_bytes=0,
        cached_bytes=0,
        least_unit_bytes=0,
        io=None,
        activations=plan_activations(config, device),
        ranks=ranks,
        device=device,
        budget=replace(budget, free_nvme=None),  # it changes from hour to hour, and what follows from it is planned
        stage=zero.stage,
        accumulation=accumulation,
        managed_accumulation=config.managed_gradient_accumulation,
        sums=holds_sums(config, rules, [layout for layout in layouts if layout.trainable]),
        grad_divisor=ranks.size if config.gradient_allreduce_op == "mean" else 1,
        pin_memory=any(
            part.pin_memory for part in (zero.offload_param, zero.offload_optimizer) if part.device in pinned
        ),
        seed=config.infinity.seed,
        adam_threads=config.infinity.adam_threads or device.processors,
        check_nan=config.infinity.check_nan,
        step_nbytes=_step_nbytes(layouts, device) if train else 0,
        debug=config.infinity.debug,
    )
    placed = partial(_placed, bare, config, discovered)

    faster = on_device(layouts, rules, budget, device, lambda chosen: placed(chosen).peak_nbytes()[TierKind.DEVICE])
    faster = fill(layouts, rules, accumulation, budget, device, faster, lambda chosen: placed(chosen).peak_of_host())
    plan = placed(faster)
    if not train or not speculates(config):
        return plan
    taken = {**plan.peak_nbytes(), TierKind.HOST: plan.peak_of_host()}
    drafts = choose_drafts(layouts, plan.placement, budget, device, taken, durable=config.infinity.durable)
    return placed(faster, drafts) if drafts.units else plan


def _placed(bare: Plan, config: Config, discovered: Discovered, faster: Faster, drafts: Drafts | None = None) -> Plan:
    """Return `bare` with the extents of all states, the buffers and the files that they need."""
    layouts, rules, ranks, device = bare.units, bare.policy, bare.ranks, bare.device
    drafts = drafts or Drafts()
    placement = place(layouts, rules, faster, drafts.slots)
    trained = [layout for layout in layouts if layout.trainable]
    pools: list[PoolSpec] = []
    if bare.update is not None:
        pools += gradient_pools(trained, rules, placement, ranks, device, debug=bare.debug)
        pools += update_pools(trained, rules, placement, device, debug=bare.debug)
    io = plan_io(config, placement, train=bare.update is not None)
    if io is not None and not device.host_addressable:
        pools += staging_pools(config, layouts, placement)
    if bare.activations is not None:
        pools += bare.activations.pools()
    if ranks.backend == "gloo":
        pools.append(exchange_pool(layouts, ranks))
    taken = sum(held.get(TierKind.DEVICE, 0) for held in (placement.nbytes, placement.passing)) + sum(
        pool.nbytes for pool in pools if pool.tier.on_device
    )
    taken += bare.step_nbytes
    room = device.usable - taken if device.usable else None
    in_place = used_in_place(placement, ranks, device) if bare.update is None else frozenset[int]()
    moved, left = discovered.without(in_place), [layout for layout in layouts if layout.index not in in_place]
    late = frozenset[int]()
    # Each commit has the parameters of its step, and a draft needs those of before in the tier.
    if bare.update is not None and not config.infinity.durable:
        late = written_late(layouts, placement, rules, device) - drafts.units
    order = {"repeats": bare.update is None, "leaves_late": not device.host_addressable}
    units, prefetch_bytes = unit_pool(config, moved, left, rules, room, **order)
    return replace(
        bare,
        placement=placement,
        drafted=drafts.units,
        in_place=in_place,
        written_late=late,
        pools=(units, *pools),
        prefetch_bytes=prefetch_bytes,
        cached_bytes=0 if rules.resident else cached_bytes(config, left),
        least_unit_bytes=least_unit_bytes(moved, left, **order),
        io=io,
    )


def _step_nbytes(layouts: Sequence[UnitLayout], device: DeviceInfo) -> int:
    """Return the most bytes that the update of a parameter by a rule in Python takes beside the buffers."""
    whole = (RecordsFormat(layout) for layout in layouts if layout.windows)
    return max((each.step_nbytes(copied=not device.host_addressable) for each in whole), default=0)


def lay_out(
    discovered: Discovered,
    dtype: torch.dtype | None,
    shards: int,
    *,
    norm_of: NormOf = "model",
    frozen: FrozenFormat | None = None,
) -> tuple[UnitLayout, ...]:
    """Return the layout of each unit, with `shards` shards. dtype: of floating parameters; None: their own.

    norm_of: as in `layout_unit`. frozen: code of frozen units; None: they are stored as they are.
    """
    layouts: list[UnitLayout] = []
    for index, unit in enumerate(discovered.units):
        first = layouts[-1].end if layouts else 0
        wanted = None if unit.keeps else dtype
        own = trained_dtype(unit.members[0].name, unit.dtype, wanted, trainable=unit.trainable)
        code = FrozenCode(frozen, own) if frozen and unit.coded and own in CODED_DTYPES else None
        made = layout_unit(
            index, unit.name, unit.members, own, unit.trainable, shards, first, norm_of=norm_of, code=code
        )
        layouts.append(made)
    return tuple(layouts)
