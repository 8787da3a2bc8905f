"""Learning-rate schedules of the config as torch schedulers: lr = the group's highest rate × a factor of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.optim.lr_scheduler import LambdaLR

from infinity.engine import lr_schedules
from infinity.engine.client_scheduler import RateScheduler

if TYPE_CHECKING:
    from infinity.config import Scheduler, WarmupCosineLR, WarmupDecayLR, WarmupLR

    Warmup = WarmupLR | WarmupDecayLR | WarmupCosineLR

Factor = Callable[[int], float]

_CLASSES: dict[str, Callable[..., RateScheduler]] = {
    "LRRangeTest": lr_schedules.LRRangeTest,
    "OneCycle": lr_schedules.OneCycle,
}


def _rise(num_steps: int, kind: str) -> Factor:
    """Return a warm-up factor: 0 at step 0, 1 from step num_steps on.

    kind: "linear", or "log" for log(step + 1) / log(num_steps).
    """

    def factor(step: int) -> float:
        if step >= num_steps:
            return 1.0
        if kind == "linear":
            return step / num_steps
        return min(1.0, math.log(step + 1) / math.log(max(2, num_steps)))

    return factor


def factor(schedule: Warmup, highest: float) -> Factor:
    """Return step → fraction of the highest learning rate. highest: that rate."""
    params = schedule.params
    rise = _rise(params.warmup_num_steps, params.warmup_type)
    if schedule.type == "WarmupCosineLR":
        start, end = schedule.params.warmup_min_ratio, schedule.params.cos_min_ratio
    else:
        start, end = schedule.params.warmup_min_lr / highest if highest else 0.0, 0.0

    def warm(step: int) -> float:
        return start + (1.0 - start) * rise(step)

    if schedule.type == "WarmupLR":
        return warm
    first, last = schedule.params.warmup_num_steps, schedule.params.total_num_steps
    cosine = schedule.type == "WarmupCosineLR"

    def whole(step: int) -> float:
        if step < first:
            return warm(step)
        gone = min(1.0, (step - first) / max(1, last - first))
        left = 0.5 * (1.0 + math.cos(math.pi * gone)) if cosine else 1.0 - gone
        return end + (1.0 - end) * left

    return whole


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
