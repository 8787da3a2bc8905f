"""Learning-rate schedules of the config as torch schedulers: lr = the group's highest rate × a factor of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.optim.lr_scheduler import LambdaLR

from infinity.engine.schedules import classes, formulas
from infinity.engine.schedules.client import RateScheduler

if TYPE_CHECKING:
    from infinity.config import Scheduler, WarmupCosineLR, WarmupDecayLR, WarmupLR

    Warmup = WarmupLR | WarmupDecayLR | WarmupCosineLR

Factor = Callable[[int], float]

_CLASSES: dict[str, Callable[..., RateScheduler]] = {
    "LRRangeTest": classes.LRRangeTest,
    "OneCycle": classes.OneCycle,
}


def factor(schedule: Warmup, highest: float) -> Factor:
    """Return step → fraction of the highest learning rate. highest: that rate."""
    params = schedule.params
    decay, total, end = None, 0, 0.0
    if schedule.type == "WarmupCosineLR":
        start, end = schedule.params.warmup_min_ratio, schedule.params.cos_min_ratio
        decay, total = "cosine", schedule.params.total_num_steps
    else:
        start = schedule.params.warmup_min_lr / highest if highest else 0.0
        if schedule.type == "WarmupDecayLR":
            decay, total = "linear", schedule.params.total_num_steps
    shape = formulas.Warmup(params.warmup_num_steps, params.warmup_type, formulas.CONFIG, decay, total)
    return lambda step: shape.rate(step, start, 1.0, end)


def make_scheduler(optimizer: torch.optim.Optimizer, schedule: Scheduler | None, lr: float) -> RateScheduler | None:
    """Construct the scheduler of the config; None without one. LRRangeTest and OneCycle have rates of their own.

    lr: learning rate of the optimizer. Groups with another rate keep their ratio to it, unless `warmup_max_lr` sets one
    rate for all.
    """
    if schedule is None:
        return None
    if schedule.type == "LRRangeTest" or schedule.type == "OneCycle":
        return _CLASSES[schedule.type](optimizer, **schedule.params.model_dump())
    highest = getattr(schedule.params, "warmup_max_lr", None)
    if highest is not None:
        for group in optimizer.param_groups:
            group["lr"] = highest
    return LambdaLR(optimizer, factor(schedule, highest if highest is not None else lr))


def replace_schedule(scheduler: LambdaLR, schedule: Warmup, lr: float) -> None:
    """Let a scheduler that `make_scheduler` constructed with `lr` follow another `schedule` from its next step on.

    Its rates are then those of a scheduler constructed with `schedule`. Both schedules have the same `warmup_max_lr`.
    """
    highest = getattr(schedule.params, "warmup_max_lr", None)
    whole = factor(schedule, highest if highest is not None else lr)
    scheduler.lr_lambdas = [whole] * len(scheduler.lr_lambdas)
