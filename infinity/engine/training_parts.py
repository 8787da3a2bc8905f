"""What training needs besides the parts that run a model: gradients, and the update of units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from torch import nn

from infinity.checkpoint.background import Saver
from infinity.comm.agreement import groups_in_common
from infinity.comm.collectives import Ranks
from infinity.comm.model_parallel import ModelRanks
from infinity.config import Config
from infinity.engine.parts import Parts, assemble
from infinity.errors import ConfigError
from infinity.grads.collector import GradCollector
from infinity.grads.store import GradPlaces, GradStore
from infinity.plan.layout import UnitLayout
from infinity.plan.placement import State, tiles
from infinity.plan.policy import policy, update_schedule
from infinity.tiers.device import Device
from infinity.tiers.pool import size_classes
from infinity.units.lay_out import lay_out
from infinity.update.kernels import check_on_device, update_run
from infinity.update.pipeline import Places, UpdatePipeline

_GRADIENTS_AT_ONCE = 4
# Of shards that are summed in another dtype than they are reduced in: one is updated from, the next is added to.
_SUMS_AT_ONCE = 2
# Of tiles: half are read ahead, half are written.
_TILE_BUFFERS = 6


@dataclass(kw_only=True)
class TrainingParts(Parts):
    """Everything that a training engine is made of."""

    collector: GradCollector
    gradients: GradStore
    pipeline: UpdatePipeline
    update: str
    saver: Saver = field(default_factory=Saver)

    def counters(self) -> dict[str, Any]:
        found = super().counters()
        found["wait_seconds"] += self.collector.wait_seconds
        return {**found, "update_seconds": self.pipeline.seconds, "updated_elements": self.pipeline.elements}

    def closer(self) -> Callable[[], None]:
        saver, pipeline, gradients, close_tiers = self.saver, self.pipeline, self.gradients, super().closer()

        def close() -> None:
            saver.close(then=give_back)  # first, as updates may wait for it

        def give_back() -> None:
            pipeline.close()
            gradients.close()
            close_tiers()

        return close


def assemble_training(
    model: nn.Module,
    config: Config,
    groups: Sequence[dict[str, object]],
    device: Device,
    ranks: Ranks,
    accumulation: int,
) -> TrainingParts:
    """Build every part for `model` and move its values into their tiers. On an error nothing is left behind."""
    ranks.model = ModelRanks.of(model, ranks.replicas)
    if ranks.model.size > 1 and config.infinity.moments == "8bit":
        raise ConfigError(
            'infinity.moments is "8bit", whose blocks of 256 would not be those of the whole parameter, which tensor '
            'parallelism divides: use "bf16" or "fp32"'
        )
    found, layouts = lay_out(model, config, groups, ranks.shards, ranks.model.copies)
    rules = policy(config, accumulation, ranks.info)
    if rules.optim_tier == "device" and device.torch_device.type == "cuda":
        check_on_device(config.optimizer.rule, config.infinity.moments)
    parts = assemble(model, config, found, layouts, rules, device, ranks, groups_in_common(config, groups))
    try:
        return _with_updates(parts, config)
    except BaseException:
        parts.closer()()
        raise


def _with_updates(parts: Parts, config: Config) -> TrainingParts:
    trainable = [unit.layout for unit in parts.units if unit.layout.trainable]
    places = _grad_places(parts, trainable, config.infinity.adam_threads)
    gradients = GradStore(parts.ranks, places)
    collector = GradCollector(parts.units, parts.ranks, places, gradients)
    pipeline = UpdatePipeline(
        _update_places(parts, trainable),
        partial(update_run, seed=config.infinity.seed, threads=config.infinity.adam_threads),
    )
    parts.store.pipeline = pipeline
    parts.store.on_move = collector.moved_on
    have = {each.name: getattr(parts, each.name) for each in fields(parts)}
    needs = {"collector": collector, "gradients": gradients, "pipeline": pipeline, "update": update_schedule(config)}
    return TrainingParts(**{**have, **needs})


def _grad_places(parts: Parts, trainable: Sequence[UnitLayout], threads: int) -> GradPlaces:
    rules, device = parts.policy, parts.device
    dtypes = [rules.grads(layout.dtype) for layout in trainable]
    collected = [x.numel * kept.collected.itemsize for x, kept in zip(trainable, dtypes, strict=True)]
    reduced = [x.numel * kept.reduced.itemsize for x, kept in zip(trainable, dtypes, strict=True)]
    stored = [x.shard_numel * kept.stored.itemsize for x, kept in zip(trainable, dtypes, strict=True)]
    tier = parts.tiers[rules.optim_tier]
    few = parts.pools.in_flight(_GRADIENTS_AT_ONCE, max(collected))
    at_once = len(trainable) if rules.grads_whole else few
    reduce_pool = host_pool = None
    if any(kept.collected != kept.reduced for kept in dtypes):
        sizes = size_classes(reduced, few)
        reduce_pool = parts.pools.make("gradients to reduce", sizes, on_device=True)
    if not device.host_addressable and not tier.on_device:
        sizes = size_classes([nbytes // parts.ranks.shards for nbytes in reduced], few)
        host_pool = parts.pools.make("gradient shards", sizes, on_device=False)
    sums = _SUMS_AT_ONCE if any(kept.reduced != kept.stored for kept in dtypes) else 1
    return GradPlaces(
        device=device,
        tier=tier,
        placement=parts.placement,
        dtypes=rules.grads,
        pool=parts.pools.make("gradients", size_classes(collected, at_once), on_device=True),
        reduce_pool=reduce_pool,
        host_pool=host_pool,
        stored_pool=parts.pools.make("stored gradients", {max(stored): sums}, on_device=tier.on_device),
        whole=rules.grads_whole,
        threads=threads,
    )


def _update_places(parts: Parts, trainable: Sequence[UnitLayout]) -> Places:
    rules, device = parts.policy, parts.device
    tier = parts.tiers[rules.optim_tier]
    tile_size, formats = rules.tile_size, rules.states
    state_bytes = max(tiles(x.shard_numel, tile_size, formats(x.dtype))[0].nbytes for x in trainable)
    grad_bytes = max(min(x.shard_numel, tile_size) * rules.grads(x.dtype).stored.itemsize for x in trainable)
    count = parts.pools.in_flight(_TILE_BUFFERS, state_bytes) if tier.name == "nvme" else 0
    staged = not device.host_addressable and not tier.on_device
    largest_shard = max(x.shard_nbytes for x in trainable)
    placement = parts.placement  # the thread of the update must not keep the model alive
    return Places(
        device=device,
        param_tier=parts.tiers[rules.param_tier],
        optim_tier=tier,
        grad_tier=tier,
        param_extent=lambda unit: placement.of(unit, State.PARAM),
        optim_extent=lambda unit: placement.of(unit, State.OPTIM),
        grad_extent=lambda unit: placement.of(unit, State.GRAD),
        formats=formats,
        tile_size=tile_size,
        reads_ahead=max(count, _TILE_BUFFERS) // 2,
        tile_pool=parts.pools.make("tiles", {state_bytes: count} if count else {}, on_device=False),
        grad_tile_pool=parts.pools.make("gradient tiles", {grad_bytes: count} if count else {}, on_device=False),
        param_pool=parts.pools.make("parameter shards", {largest_shard: 2}, on_device=False) if staged else None,
        grads=rules.grads,
    )
