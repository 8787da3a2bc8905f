"""Plans a model, and builds the parts of an engine from the plan: opens tiers, streams values in, connects the parts.

`plan_model` reads the config, and all parts are built from the plan. Only the engine reads the config afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from infinity.activations.store import ActivationStore
from infinity.checkpoint.snapshot import check_tiles
from infinity.comm.agreement.comparison import groups_in_common, in_common
from infinity.comm.communicator import Communicator
from infinity.comm.dtensor import TensorParallelMesh
from infinity.durable.run import DurableRun
from infinity.engine.budget import budget_of, check_files_in_memory, check_memory, plan_units
from infinity.engine.durable import DurableSteps
from infinity.engine.parts import EngineParts, UpdateParts, close_memory
from infinity.engine.platform import MACHINE, Platform
from infinity.engine.precision import warn_of_emulation
from infinity.engine.profile import Profiler
from infinity.engine.runner import Runner
from infinity.engine.supported import check_wrappers
from infinity.engine.training_runner import TrainingRunner
from infinity.errors import ConfigError
from infinity.grads.buffers import GradBuffers
from infinity.grads.collector import GradCollector
from infinity.grads.store import GradStore
from infinity.model.aliases import check_aliases
from infinity.model.backward import BackwardTracker, ComingGradients, Engine
from infinity.model.saved import SavedTensors, Scope
from infinity.observe.log import show_by_default
from infinity.optim.parameter_rule import ParameterRule
from infinity.plan import pools as sizes
from infinity.plan.budget import Budget
from infinity.plan.placement import State
from infinity.plan.plan import Plan
from infinity.plan.policy import compute_dtype
from infinity.plan.remedy import Replan
from infinity.schedule.schedule import Schedule
from infinity.schedule.step import Step
from infinity.tier_kind import TierKind
from infinity.tiers.available import memory_limit
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.files import warn_of_memory
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.open_tiers import Pools
from infinity.tiers.passing import PassingSpace, PassingTier
from infinity.units.discover import ModelUnits
from infinity.units.states import UnitStates
from infinity.units.store import UnitStore
from infinity.units.unit import Unit
from infinity.units.updating import UpdatingUnits
from infinity.update.kernels import Kernels
from infinity.update.pipeline import UpdatePipeline
from infinity.update.tiles import UpdateBuffers

if TYPE_CHECKING:
    from infinity.config import Config

_PARTITIONED = "activation_checkpointing.partition_activations"


@dataclass(frozen=True)
class PlannedModel:
    """A model's plan, its units, and the properties that ranks compare (`comm.agreement.comparison.in_common`).

    replan: plans the model again, with another config and budget.
    """

    plan: Plan
    units: ModelUnits
    common: tuple[str, ...]
    budget: Budget
    replan: Replan


def plan_model(
    model: nn.Module,
    config: Config,
    groups: Sequence[dict[str, object]],
    device: Device,
    ranks: Communicator,
    rules: Sequence[ParameterRule | None] = (),
    *,
    train: bool = True,
    dtype: torch.dtype | None = None,
    platform: Platform = MACHINE,
) -> PlannedModel:
    """Discover the units of `model` and plan its engine. Allocates nothing.

    rules: the rule in Python of each group (`discover_model`). Other arguments: see `make_plan`.
    """
    ranks.set_mesh(TensorParallelMesh.of(model, ranks.replicas))
    if train and ranks.model.size > 1 and config.infinity.moments == "8bit":
        raise ConfigError(
            'infinity.moments is "8bit", whose blocks of 256 elements would straddle the shards of tensor parallelism: '
            'use "bf16" or "fp32"'
        )
    if ranks.model.size > 1 and config.infinity.frozen != "as_is":
        raise ConfigError(
            f'infinity.frozen is "{config.infinity.frozen}", whose groups of 64 elements would straddle the shards of '
            'tensor parallelism: use "as_is"'
        )
    if ranks.model.size > 1 and _PARTITIONED in config.notes.ignored:
        raise ConfigError(
            f"{_PARTITIONED} is true, and the model's tensor-parallel ranks would each keep whole activations: remove "
            'it, and set infinity.activations.device to "cpu" or "nvme" to keep them off the device'
        )
    if ranks.model.size > 1 and any(rules):
        raise ConfigError(
            f"the optimizer is {next(filter(None, rules)).name}, which updates whole parameters, and tensor "
            "parallelism divides them: use AdamW or another native rule (docs/optimizer.md)"
        )
    compute = dtype or compute_dtype(config)
    check_wrappers(model, compute)
    if ranks.is_main_rank:
        warn_of_emulation(config, compute, device.torch_device)
    info = device.info
    info = replace(info, limit=config.infinity.memory.device or 0, updates=platform.kernels.is_exact(info.type))
    free, on_host = platform.free_on_each, info.type == "cpu"
    budget = budget_of(config, ranks, computes_on_host=on_host, train=train, free_on_each=free)

    def planned(config: Config, budget: Budget) -> tuple[ModelUnits, Plan]:
        copies = ranks.model.copies
        return plan_units(
            model, config, groups, ranks.info, info, budget, rules=rules, train=train, dtype=dtype, copies=copies
        )

    units, plan = planned(config, budget)
    check_tiles(model, plan.units, plan.policy.states if train else None)
    common = in_common(config, plan.units, model)
    if train:
        own = {n: sorted(g.keys() - {"params"}) for n, (g, rule) in enumerate(zip(groups, rules, strict=False)) if rule}
        common += groups_in_common(config, groups, own)
        if TierKind.DEVICE in plan.placement.tiers(State.OPTIM) and plan.device.type != "cpu":
            platform.kernels.check_on_device(plan.device.type, config.optimizer.rule, config.infinity.moments)
    if info.limit or budget != Budget():  # ranks with other kernels, devices or free memory would place other states
        held = (f"{nbytes} bytes on {tier}" for tier, nbytes in sorted(plan.placement.nbytes.items()))
        common.append(f"infinity.memory places {', '.join(held)}")
    # Ranks on devices of different sizes would evict different units.
    common.append(f"infinity.prefetch_bytes gives {plan.prefetch_bytes} bytes, {plan.buffers(sizes.UNITS)} buffers")
    return PlannedModel(plan, units, tuple(common), budget, lambda *changed: planned(*changed)[1])


def assemble(
    model: nn.Module,
    planned: PlannedModel,
    config: Config,
    device: Device,
    ranks: Communicator,
    engine: Engine,
    platform: Platform = MACHINE,
) -> EngineParts:
    """Build the parts for `model`, and move its values to their tiers. engine: the one that they are for. Releases
    everything after an error.

    Collective: ranks compare `planned.common` before anything is allocated.
    """
    plan = planned.plan
    check_aliases(model)
    platform.prepare(model)
    ranks.check_consistent(planned.common)
    ranks.set_layouts(plan.units)
    available = platform.available(device)
    if available is not None:
        if plan.io is not None and ranks.is_main_rank:
            show_by_default()
            warn_of_memory(plan.io.folders)  # first: files there may be what leaves too little
        check_memory(config, plan, planned.budget, planned.replan, available, model, memory_limit())
        check_files_in_memory(plan, available[TierKind.HOST])
    if plan.device.limit:
        device.limit(plan.device.limit)
    tiers: dict[TierKind, Tier] = {}
    activations: ActivationStore | None = None
    run: DurableRun | None = None
    try:
        plan = platform.striped(plan, config, ranks)
        run = platform.open_run(plan, config, ranks)
        rank, files = (ranks.rank, None) if run is None else (run.rank, run.files)
        tiers = platform.open_tiers(plan, device, rank, files)
        activations = platform.open_activations(plan.activations, device, ranks.rank)
        states = UnitStates(plan.placement, tiers, plan.policy.states, ranks, device)
        in_order = planned.units.in_order(plan.units)
        units = platform.stream_in(model, in_order, plan.units, states, ranks, device.torch_device)
        backward = BackwardTracker(engine)
        return wire(
            plan,
            units,
            planned.units.needed,
            tiers,
            activations,
            states,
            device,
            ranks,
            backward,
            platform.kernels,
            run,
        )
    except BaseException:
        with ExitStack() as closing:  # in reverse order
            if run is not None:
                closing.callback(run.close)
            closing.callback(close_memory, device, tiers.values(), activations)
        raise


def wire(
    plan: Plan,
    units: Sequence[Unit],
    needed: Mapping[nn.Module, Sequence[int]],
    tiers: dict[TierKind, Tier],
    activations: ActivationStore | None,
    states: UnitStates,
    device: Device,
    ranks: Communicator,
    backward: BackwardTracker,
    kernels: Kernels,
    run: DurableRun | None,
) -> EngineParts:
    """Connect the parts of an engine by their constructors. needed: indices of the units of each module."""
    pools = Pools(plan.own_pools, device, tiers.values(), debug=plan.debug)
    pool = pools[sizes.UNITS]
    schedule = Schedule(
        # Units in place take no buffer, and no part of those for units ahead.
        [0 if unit.index in plan.in_place else unit.layout.nbytes for unit in units],
        [0 if unit.index in plan.in_place else pool.size_class(unit.layout.nbytes) for unit in units],
        Step(plan.accumulation, early=plan.update == "during_backward", managed=plan.managed_accumulation),
        prefetch_bytes=plan.prefetch_bytes,
        alone=ranks.is_single,
        sums_whole=plan.policy.grads_whole,
        in_forward=plan.in_forward,
        drafted=plan.drafted,
    )
    coming = ComingGradients(backward)
    store = UnitStore(units, pool, states, device, ranks, schedule, plan.in_place)
    scope = Scope(SavedTensors(backward, activations), store.resident)
    training: UpdateParts | None = None
    if plan.update is None:
        runner = Runner(plan, schedule, store, scope, device, ranks)
    else:
        grad_tiers = _grad_tiers(plan, tiers, device)
        buffers = _grad_buffers(plan, grad_tiers, pools, device, kernels)
        gradients = GradStore(ranks, buffers)
        collector = GradCollector(ranks, buffers, gradients)
        kernel = partial(kernels.update_run, seed=plan.seed, threads=plan.adam_threads)
        update_buffers = _update_buffers(plan, tiers, grad_tiers, pools, device, ranks.shard_rank)
        pipeline = UpdatePipeline(update_buffers, kernel, kernels.update_whole)
        trained = (unit.index for unit in units if unit.layout.trainable)
        in_tier = [index for index in trained if update_buffers.updated_in(index) == "tier"]
        updating = UpdatingUnits(store, in_tier, plan.written_late)
        runner = TrainingRunner(
            plan, schedule, updating, scope, device, ranks, backward, coming, collector, gradients, pipeline
        )
        training = UpdateParts(
            runner=runner,
            collector=collector,
            gradients=gradients,
            pipeline=pipeline,
            profiler=Profiler(device.recorder),
            durable=None if run is None else DurableSteps(run, plan, tiers, runner, ranks, device, pipeline.refused),
            passing=next((tier for tier in grad_tiers.values() if isinstance(tier, PassingTier | PassingSpace)), None),
        )
    return EngineParts(
        plan=plan,
        device=device,
        ranks=ranks,
        tiers=tiers,
        activations=activations,
        pools=pools,
        schedule=schedule,
        store=store,
        runner=runner,
        backward=backward,
        coming=coming,
        units_of_module={module: [units[i] for i in indices] for module, indices in needed.items()},
        unit_of={id(p): unit for unit in units for p in unit.parameters},
        states=states,
        training=training,
    )


def _grad_tiers(plan: Plan, tiers: dict[TierKind, Tier], device: Device) -> dict[TierKind, Tier]:
    kinds = sorted(plan.placement.tiers(State.GRAD))
    return {
        kind: _passing_tier(kind, plan, tiers, device) if plan.policy.passes(kind) else tiers[kind] for kind in kinds
    }


def _passing_tier(kind: TierKind, plan: Plan, tiers: dict[TierKind, Tier], device: Device) -> Tier:
    if kind.in_memory:
        return PassingTier(kind, device)
    tier = tiers[kind]
    assert isinstance(tier, NvmeTier)
    extents = [plan.placement.of(layout.index, State.GRAD) for layout in plan.units if layout.trainable]
    return PassingSpace(tier, [extent for extent in extents if extent.tier is kind])


def _grad_buffers(
    plan: Plan, tiers: dict[TierKind, Tier], pools: Pools, device: Device, kernels: Kernels
) -> GradBuffers:
    return GradBuffers(
        device=device,
        tiers=tiers,
        placement=plan.placement,
        dtypes=cache(plan.policy.grads),
        pool=pools[sizes.GRADIENTS],
        reduce_pool=pools.get(sizes.GRADIENTS_TO_REDUCE),
        host_pool=pools.get(sizes.GRADIENT_SHARDS),
        stored_pool=pools.get(sizes.STORED_GRADIENTS),
        threads=plan.adam_threads,
        kernels=kernels,
    )


def _update_buffers(
    plan: Plan, tiers: dict[TierKind, Tier], grad_tiers: dict[TierKind, Tier], pools: Pools, device: Device, rank: int
) -> UpdateBuffers:
    return UpdateBuffers(
        device=device,
        placement=plan.placement,
        tiers=tiers,
        grad_tiers=grad_tiers,
        formats=plan.policy.states,
        rank=rank,
        grads=plan.policy.grads,
        reads_ahead=sizes.reads_ahead(plan.buffers(sizes.TILES)),
        tile_pool=pools[sizes.TILES],
        grad_tile_pool=pools[sizes.GRADIENT_TILES],
        param_pool=pools.get(sizes.PARAMETER_SHARDS),
        beside_compute=plan.updates_beside_compute,
    )
