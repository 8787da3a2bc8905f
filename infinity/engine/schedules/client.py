"""A learning-rate scheduler that the user constructed, or a function that constructs one.

Learning-rate schedules of the config as torch schedulers: lr = the group's highest rate × a factor of the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.lr_scheduler import LambdaLR

from infinity.engine.schedules import classes, formulas
from infinity.errors import ConfigError, UsageError

_METHODS = ("step", "state_dict", "load_state_dict")


class RateScheduler(Protocol):
    """A scheduler that an engine steps: torch's, those of `infinity.engine.schedules`, and others."""

    def step(self, *args: Any, **kwargs: Any) -> Any: ...
    def get_last_lr(self) -> list[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


MakeScheduler = Callable[[torch.optim.Optimizer], RateScheduler]


def constructs_schedulers(scheduler: Any) -> bool:
    """Return True for a class or function, and False for a scheduler, which may be callable as well."""
    return isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step"))


def check_scheduler(scheduler: Any, *optimizers: torch.optim.Optimizer | None) -> None:
    """Raise ConfigError if `scheduler` is no scheduler, or sets the rates of another optimizer than `optimizers`."""
    kind = type(scheduler).__name__
    lacks = [name for name in _METHODS if not callable(getattr(scheduler, name, None))]
    if lacks:
        raise ConfigError(
            f"lr_scheduler ({kind}) has no {', '.join(lacks)}: pass a scheduler of the optimizer, or a function of the "
            "optimizer that returns one"
        )
    driven = getattr(scheduler, "optimizer", None)
    if driven is not None and not any(driven is optimizer for optimizer in optimizers if optimizer is not None):
        raise ConfigError(
            f"lr_scheduler ({kind}) sets the rates of a {type(driven).__name__} that the engine does not use, so the "
            "rates would never change: pass that optimizer as optimizer=, or pass a function of the optimizer that "
            "returns the scheduler"
        )


def step_arguments(scheduler: RateScheduler | None, lr_kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the arguments for `scheduler.step`. Call it before the update that precedes the step of the scheduler.

    Raises UsageError if `lr_kwargs` does not fit.
    """
    if scheduler is None:
        return {}
    signature = inspect.signature(scheduler.step)
    flexible = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in flexible]
    kind, given = type(scheduler).__name__, dict(lr_kwargs or {})
    if not (given or needed):
        return {}
    try:
        signature.bind(**given)
    except TypeError as error:
        example = ", ".join(f'"{name}": …' for name in needed) or "…"
        raise UsageError(
            f"{kind}.step() cannot be called with lr_kwargs = {given}: {error}. Pass "
            f"engine.step(lr_kwargs={{{example}}}), or leave lr_scheduler out of initialize() and step {kind} "
            "yourself"
        ) from None
    return given


def construct_scheduler(
    scheduler: RateScheduler | MakeScheduler, optimizer: torch.optim.Optimizer, *clients: torch.optim.Optimizer
) -> RateScheduler:
    """Return a scheduler of `optimizer`, the engine's, from an instance that was checked or from a function of it.

    clients: the client's optimizers, whose param_groups `optimizer` shares.
    """
    if not constructs_schedulers(scheduler):
        return scheduler  # type: ignore[return-value]
    constructed = scheduler(optimizer)  # type: ignore[operator]
    check_scheduler(constructed, optimizer, *clients)
    return constructed


if TYPE_CHECKING:
    from infinity.config import Scheduler, WarmupCosineLR, WarmupDecayLR, WarmupLR

    Warmup = WarmupLR | WarmupDecayLR | WarmupCosineLR

Factor = Callable[[int], float]


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
    if schedule.type == "LRRangeTest":
        return classes.LRRangeTest(optimizer, **schedule.params.model_dump())
    if schedule.type == "OneCycle":
        return classes.OneCycle(optimizer, **schedule.params.model_dump())
    highest = getattr(schedule.params, "warmup_max_lr", None)
    if highest is not None:
        for group in optimizer.param_groups:
            group["lr"] = highest
    return LambdaLR(optimizer, factor(schedule, highest if highest is not None else lr))
