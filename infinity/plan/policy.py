"""Translates a config into a plan: tier and format of each state, update schedule, layout of units.

Pure: allocates nothing and does not change the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from infinity.comm.collectives import Ranks
from infinity.comm.dtensor import local
from infinity.config import Config
from infinity.errors import ModelError
from infinity.plan.formats import state_format
from infinity.plan.grad_dtypes import grad_dtypes
from infinity.plan.layout import UnitLayout, layout_unit
from infinity.plan.placement import Policy
from infinity.plan.stage import Sharding
from infinity.units.discover import Discovered, discover

TIERS = {"none": "device", "cpu": "host", "nvme": "nvme"}
"""Name of a device in the config → tier."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name of a dtype in the config → dtype."""


def update_schedule(config: Config) -> str:
    """Return the update schedule. `auto` is "next_forward" with clipping or fp16, which need the norm of all gradients
    before the first update; otherwise "during_backward".
    """
    if config.infinity.update == "auto":
        global_first = config.gradient_clipping > 0 or config.fp16.enabled
        return "next_forward" if global_first else "during_backward"
    return config.infinity.update


def policy(config: Config, accumulation: int, ranks: Ranks) -> Policy:
    """Return the tier and format of each state. Gradients are stored in the tier of the optimizer states."""
    zero = config.zero_optimization
    sharding = Sharding.of(zero.stage)
    optim_tier = TIERS[zero.offload_optimizer.device]
    whole = not sharding.grads and accumulation > 1
    return Policy(
        param_tier=TIERS[zero.offload_param.device],
        optim_tier=optim_tier,
        grad_tier=optim_tier,
        grads=partial(
            grad_dtypes,
            communication=_communication(config, ranks),
            accumulation=DTYPES[config.data_types.grad_accum_dtype],
            micro_batches=accumulation,
            exchanged=not ranks.alone,
            whole=whole,
        ),
        states=partial(
            state_format,
            master=config.infinity.master,
            rule=config.optimizer.rule,
            moments=config.infinity.moments,
        ),
        tile_size=config.infinity.tile_size,
        resident=not sharding.params,
        grads_whole=whole,
    )


def _communication(config: Config, ranks: Ranks) -> torch.dtype | None:
    """Return the dtype of the sum of gradients over ranks; None: their own dtype."""
    if config.communication_data_type is not None:
        return DTYPES[config.communication_data_type]
    return torch.float32 if ranks.backend == "gloo" else None


def compute_dtype(config: Config) -> torch.dtype | None:
    """Return the dtype of all floating parameters in training; None: their present dtypes."""
    if config.bf16.enabled:
        return torch.bfloat16
    return torch.float16 if config.fp16.enabled else None


def _trained_dtype(unit: Discovered, wanted: torch.dtype | None) -> torch.dtype:
    if not unit.dtype.is_floating_point:
        if unit.trainable:
            raise ModelError(
                f"{unit.names[0]} is {unit.dtype}, which no optimizer here trains: convert it to fp32, or freeze it"
            )
        return unit.dtype
    if wanted is not None:
        return wanted
    if unit.trainable and unit.dtype != torch.float32:
        raise ModelError(
            f'{unit.names[0]} is {str(unit.dtype).removeprefix("torch.")}, which is trained only with "bf16" or '
            '"fp16": {"enabled": true}. Set one, or give the model fp32 parameters.'
        )
    return unit.dtype


def lay_out(
    model: nn.Module,
    config: Config,
    groups: Sequence[dict[str, object]],
    shards: int,
    copies: Callable[[nn.Parameter], int] = lambda parameter: 1,
    dtype: torch.dtype | None = None,
) -> tuple[list[Discovered], list[UnitLayout]]:
    """Return the units of `model` and the layout of each.

    groups: param_groups, which order the slots. shards: number of shards of a unit. copies: parameter → `Slot.copies`.
    dtype: dtype of all floating parameters, instead of the config's. Raises ModelError for dtypes that cannot be
    trained.
    """
    group_of = {
        id(p): number
        for number, group in enumerate(groups)
        for p in group["params"]  # type: ignore[attr-defined]
        if p.requires_grad
    }
    wanted = dtype or compute_dtype(config)
    found = discover(model, config.infinity.unit_size, width=wanted.itemsize if wanted else None)
    layouts: list[UnitLayout] = []
    for index, unit in enumerate(found):
        members = [
            (name, tuple(local(p).shape), group_of.get(id(p), -1))
            for name, p in zip(unit.names, unit.parameters, strict=True)
        ]
        first = layouts[-1].end if layouts else 0
        dtype = _trained_dtype(unit, wanted)
        layouts.append(layout_unit(index, unit.name, members, dtype, unit.trainable, shards, first))
    # A layout orders its slots by param_group; the parameters follow it.
    for index, (unit, layout) in enumerate(zip(found, layouts, strict=True)):
        by_name = dict(zip(unit.names, unit.parameters, strict=True))
        found[index] = replace(
            unit,
            names=tuple(slot.name for slot in layout.slots),
            parameters=tuple(by_name[slot.name] for slot in layout.slots),
        )
        slots = tuple(replace(slot, copies=copies(by_name[slot.name])) for slot in layout.slots)
        layouts[index] = replace(layout, slots=slots)
    return found, layouts
