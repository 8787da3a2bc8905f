"""Learning-rate schedules named in the config, as plain torch schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR


def warmup(warmup_min_lr: float, warmup_max_lr: float, warmup_num_steps: int) -> Callable[[int], float]:
    """lr by step: linear from warmup_min_lr to warmup_max_lr over warmup_num_steps, constant after."""

    def lr(step: int) -> float:
        if step >= warmup_num_steps:
            return warmup_max_lr
        return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * step / max(1, warmup_num_steps)

    return lr


def warmup_decay(
    warmup_min_lr: float, warmup_max_lr: float, warmup_num_steps: int, total_num_steps: int, *, cosine: bool, floor: float = 0.0
) -> Callable[[int], float]:
    """Like `warmup`, then down to `floor` times the maximum at total_num_steps, linearly or along half a cosine."""
    rising = warmup(warmup_min_lr, warmup_max_lr, warmup_num_steps)

    def lr(step: int) -> float:
        if step < warmup_num_steps:
            return rising(step)
        part = min(1.0, (step - warmup_num_steps) / max(1, total_num_steps - warmup_num_steps))
        left = 0.5 * (1.0 + math.cos(math.pi * part)) if cosine else 1.0 - part
        return warmup_max_lr * (floor + (1.0 - floor) * left)

    return lr


def scheduler(optimizer: torch.optim.Optimizer, lr: Callable[[int], float]) -> LambdaLR:
    """A scheduler that sets every group's lr to lr(step), whatever the optimizer was made with."""
    for group in optimizer.param_groups:
        group["lr"] = 1.0
        group["initial_lr"] = 1.0
    return LambdaLR(optimizer, lr)
