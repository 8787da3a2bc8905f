"""Learning rates of DeepSpeed's warm-up schedules, whose schedulers begin at iteration −1.

The first two updates therefore have the lowest rate. `infinity.initialize` begins at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim.lr_scheduler import LambdaLR

from infinity.config.optimization import Scheduler, WarmupCosineLR, WarmupDecayLR
from infinity.errors import ConfigError

Rate = Callable[[int], float]
_DECAY_FROM = 1e-3
"""DeepSpeed's `warmup_max_lr` of WarmupDecayLR, if the config has none."""


def follow_deepspeed(scheduler: LambdaLR, schedule: Scheduler, rates: list[float]) -> None:
    """Let `scheduler`, which has not stepped, produce DeepSpeed's rates.

    schedule: section of the config. rates: the optimizer's learning rate of each param_group.
    """
    if schedule.params.warmup_num_steps < 1:
        raise ConfigError("scheduler.params.warmup_num_steps is 0: set at least 1, as DeepSpeed needs")
    by_group = [_rate(schedule, rate) for rate in rates]
    scheduler.base_lrs = [1.0] * len(rates)  # so that lr_lambdas are rates
    scheduler.lr_lambdas = by_group
    for group, rate in zip(scheduler.optimizer.param_groups, by_group, strict=True):
        group["lr"] = rate(0)
    scheduler._last_lr = [rate(0) for rate in by_group]


def _rate(schedule: Scheduler, base: float) -> Rate:
    """Return updates so far → learning rate of the next update. base: the optimizer's own rate."""
    params = schedule.params
    warmup = max(2, params.warmup_num_steps)
    log = params.warmup_type == "log"

    def rise(iteration: int) -> float:
        return math.log(iteration + 1) / math.log(warmup) if log else iteration / warmup

    if isinstance(schedule, WarmupCosineLR):
        total, start, end = (
            schedule.params.total_num_steps,
            schedule.params.warmup_min_ratio,
            schedule.params.cos_min_ratio,
        )

        def cosine(step: int) -> float:
            iteration = step - 1
            if iteration < 0:
                return 0.0
            if iteration < warmup:
                return base * (start + rise(iteration) * (1.0 - start))
            progress = min(1.0, (iteration - warmup + 1) / max(1, total - warmup))
            return base * (end + (1.0 - end) * (1.0 + math.cos(math.pi * progress)) / 2)

        return cosine
    low, high = schedule.params.warmup_min_lr, schedule.params.warmup_max_lr
    last = schedule.params.total_num_steps if isinstance(schedule, WarmupDecayLR) else None
    if high is None:
        high = base if last is None else _DECAY_FROM

    def warm(step: int) -> float:
        iteration = step - 1
        if iteration < 0:
            return low
        part = 1.0
        if iteration < warmup:
            part = rise(iteration)
        elif last is not None:
            part = max(0.0, (last - iteration) / max(1.0, last - warmup))
        return low + (high - low) * part

    return warm
