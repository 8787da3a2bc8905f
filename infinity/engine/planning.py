"""Plans an engine from facts alone: a model, possibly on the meta device, and descriptions of ranks and device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from infinity.plan.budget import Budget
from infinity.plan.plan import Plan, make_plan
from infinity.plan.policy import DeviceInfo, RankInfo, compute_dtype
from infinity.units.discover import ModelUnits, discover_model, unit_size_of

if TYPE_CHECKING:
    from infinity.config import Config


def plan_units(
    model: nn.Module,
    config: Config,
    groups: Sequence[dict[str, object]],
    ranks: RankInfo,
    device: DeviceInfo,
    budget: Budget,
    *,
    train: bool = True,
    dtype: torch.dtype | None = None,
    copies: Callable[[nn.Parameter], int] = lambda _: 1,
) -> tuple[ModelUnits, Plan]:
    """Discover the units of `model` and plan its engine, on this machine or any other. Allocates nothing.

    copies: as of `discover_model`. Other arguments: as of `make_plan`.
    """
    compute = dtype or compute_dtype(config)
    width = compute.itemsize if compute is not None else None
    unit_size = unit_size_of(config.infinity.unit_size, model, width, device.usable)
    units = discover_model(model, unit_size, groups, dtype=compute, copies=copies)
    return units, make_plan(config, units.discovered, ranks, device, budget=budget, train=train, dtype=dtype)
