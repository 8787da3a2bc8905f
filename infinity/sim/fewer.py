"""Changes that free memory, each simulated: recomputation, activations on nvme, smaller micro-batches, bf16."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity.plan.plan import Plan
from infinity.plan.remedy import Change
from infinity.sim.gpt2 import PlannedModel
from infinity.sim.machine import Machine
from infinity.sim.needs import Needs, Variant
from infinity.sizes import counted, show_bytes
from infinity.tier_kind import TierKind

if TYPE_CHECKING:
    from infinity.config import Config

_CHECKPOINT = Change(
    "checkpoint activations (torch.utils.checkpoint around each block, or a Trainer's activation_checkpointing, "
    "gradient_checkpointing in older versions)"
)
_LEAST_SHARE = 0.02
"""Share of a peak that a change frees at least: less may be an error of the simulation."""

Predicted = Callable[[PlannedModel, "Config"], tuple[Plan, Needs]]


def fewer_activations(
    make: Callable[[], PlannedModel],
    config: Config,
    machine: Machine,
    needs: Needs,
    predicted: Predicted,
    tier: TierKind,
) -> Iterator[Variant]:
    """Yield changes that free memory in `tier`, the best first; a smaller micro-batch only if it may suffice.

    needs: without a change.
    """

    def tried(make: Callable[[], PlannedModel], config: Config, change: Change) -> Iterator[Variant]:
        for variant in _predicted(predicted, make, config, change):
            if needs.peak[tier] - variant.needs.peak[tier] >= _LEAST_SHARE * needs.peak[tier]:
                yield variant

    before, done = needs, Change()
    if (again := recomputed(make())) is not None:
        for variant in tried(lambda: again, config, _CHECKPOINT):
            yield variant
            before, done = variant.needs, variant.change
    section = config.infinity.activations
    if section.device == "none" and machine.nvme:
        section = section.model_copy(update={"device": "nvme", "nvme_path": section.nvme_path or (Path(),)})
        moved = config.model_copy(update={"infinity": config.infinity.model_copy(update={"activations": section})})
        keys = {"infinity.activations.device": "nvme"}
        if not config.infinity.activations.nvme_path and not config.zero_optimization.nvme_paths:
            keys["infinity.activations.nvme_path"] = "."
        for variant in tried(make, moved, Change('set infinity.activations.device to "nvme"', keys)):
            freed = show_bytes(needs.peak[tier] - variant.needs.peak[tier])
            yield replace(variant, change=replace(variant.change, text=f"{variant.change}, which frees {freed}"))
    remade = make if not done.text else lambda: recomputed(make()) or make()
    for change, smaller in _smaller(config, machine, before, tier):
        yield from tried(remade, smaller, done.then(change))


def in_bf16(
    make: Callable[[], PlannedModel],
    config: Config,
    machine: Machine,
    predicted: Predicted,
    tier: TierKind,
) -> Iterator[Variant]:
    """Yield changes to bf16 of a run in fp32: alone, and with fewer activations. Arguments: of `fewer_activations`."""
    if config.bf16.enabled or config.fp16.enabled:
        return
    lower = config.model_copy(update={"bf16": config.bf16.model_copy(update={"enabled": True})})
    change = Change("set bf16.enabled to true, a lower precision", {"bf16.enabled": True})
    if "bf16.enabled" in _filled(config):
        change = Change("set bf16=True in TrainingArguments, a lower precision")
    for alone in _predicted(predicted, make, lower, change):
        yield alone
        for variant in fewer_activations(make, lower, machine, alone.needs, predicted, tier):
            yield replace(variant, change=alone.change.then(variant.change))


def _predicted(
    predicted: Predicted, make: Callable[[], PlannedModel], config: Config, change: Change
) -> Iterator[Variant]:
    """Yield a changed run; nothing if the model cannot run so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a run that nobody asked for
        try:
            plan, needs = predicted(make(), config)
        except Exception:  # noqa: BLE001 - of a user's block that cannot be recomputed, or mixes dtypes
            return
    yield Variant(change, needs, plan, config)


def recomputed(model: PlannedModel) -> PlannedModel | None:
    """Return `model` with a checkpoint around each block of its module lists; None if it has none, or recomputes them.

    Changes the model's modules.
    """
    if model.checkpointed:
        return None
    lists = [module for module in model.module.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    inner = {id(child) for module in lists for block in module for child in block.modules() if child is not block}
    blocks = [block for module in lists for block in module if id(block) not in inner and [*block.parameters()]]
    if not blocks:
        return None
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    with_blocks = model.with_blocks
    deeper = None if with_blocks is None else lambda count: recomputed(with_blocks(count)) or with_blocks(count)
    return replace(model, checkpointed=True, with_blocks=deeper)


def _smaller(config: Config, machine: Machine, needs: Needs, tier: TierKind) -> Iterator[tuple[Change, Config]]:
    """Yield (change, config) of micro-batches that may fit beside smaller buffers, the largest first, with as many
    samples a step.
    """
    batch = config.resolve_batch(machine.ranks)
    held = needs.tiers[tier]
    room = needs.available[tier] - needs.peak[tier] + held["activations"] + held["buffers"]
    for micro in sorted((size for size in range(1, batch.micro) if batch.micro % size == 0), reverse=True):
        if held["activations"] * micro > room * batch.micro and micro > 1:
            continue
        accumulation = batch.accumulation * batch.micro // micro
        sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
        text = f"use a micro-batch of {micro} with gradient_accumulation_steps {accumulation}"
        change = Change(f"{text} (your loop then passes {counted(micro, 'sample')} at a time)", sizes)
        if filled := _filled(config):
            keys = {key: value for key, value in sizes.items() if key not in filled}
            change = Change(f"{text} (TrainingArguments: per_device_train_batch_size={micro})", keys)
        yield change, config.model_copy(update=sizes)


def _filled(config: Config) -> set[str]:
    """Return the keys that are "auto", which a trainer fills in from its arguments."""
    return {*config.notes.defaults, *(key for key, _ in config.notes.filled)}
