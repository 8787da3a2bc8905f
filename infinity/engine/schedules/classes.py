"""DeepSpeed's learning-rate schedulers, for any torch optimizer.

    from infinity.engine.schedules import WarmupLR

    scheduler = WarmupLR(optimizer, warmup_num_steps=100)
    optimizer.step(); scheduler.step()

Names, parameters and rates are those of DeepSpeed 0.19.8. A scheduler starts at iteration -1 and its first `step` leads
to iteration 0, so updates 1 and 2 have the lowest rate. The schedulers in the config of `infinity.initialize` start at
iteration 0 instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from infinity.engine.schedules.formulas import DEEPSPEED, WARMUP_TYPES, Cycle, Warmup, range_test_factor
from infinity.errors import ConfigError, UsageError
from infinity.observe.log import logger

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

PerGroup = float | Sequence[float]
"""One value for all param_groups, or a list or tuple with one for each."""

_CYCLE_BETA2 = 0.99
"""Second beta of every group while OneCycle cycles the first, as in DeepSpeed."""


class _Schedule(ABC):
    """Sets the rates of `optimizer`, a torch optimizer or a wrapper with one in its attribute `optimizer`."""

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = _torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Return the rate of each param_group at `last_batch_iteration`."""

    def get_last_lr(self) -> list[float]:
        """Return the rates that the scheduler set last. Raises UsageError if it has set none."""
        if self._last_lr is None:
            raise UsageError("the scheduler resumed and has set no rate yet: call scheduler.step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Proceed to the next iteration, or to `last_batch_iteration`, and set its rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._set_rates()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Continue at the iteration in `sd`. The rates in the param_groups change with the next `step`."""
        self.last_batch_iteration = sd["last_batch_iteration"]

    def _begin(self) -> None:
        """Set the first rates, unless the scheduler resumes: then the loaded param_groups hold them."""
        if self.last_batch_iteration == -1:
            self._set_rates()

    def _set_rates(self) -> None:
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


class WarmupLR(_Schedule):
    """Raises the rate from `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps, then keeps it.

    warmup_max_lr: by default the rate of each group at construction. warmup_type: "log" or "linear"; any other
    is "log", with a warning, as in DeepSpeed.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lrs = _per_group(self.optimizer, warmup_min_lr, "warmup_min_lr")
        highest = _present_rates(self.optimizer) if warmup_max_lr is None else warmup_max_lr
        self.max_lrs = _per_group(self.optimizer, highest, "warmup_max_lr")
        self.warmup_num_steps, self.warmup_type = _checked_warmup(warmup_num_steps, warmup_type)
        self._begin()

    def get_lr(self) -> list[float]:
        shape, at = self._shape(), self.last_batch_iteration
        return [shape.rate(at, low, high, low) for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _shape(self) -> Warmup:
        return Warmup(self.warmup_num_steps, self.warmup_type, DEEPSPEED)


class WarmupDecayLR(WarmupLR):
    """Warms up like WarmupLR, then lowers the rate linearly to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_of_a_long_warmup(self.warmup_num_steps, total_num_steps)

    def _shape(self) -> Warmup:
        return Warmup(self.warmup_num_steps, self.warmup_type, DEEPSPEED, "linear", self.total_num_steps)


class WarmupCosineLR(_Schedule):
    """Raises the rate from `warmup_min_ratio` of each group's present rate to all of it, then lowers it along half a
    cosine to `cos_min_ratio` of it at `total_num_steps`. The rate is 0 before the first `step`.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup_num_steps, self.warmup_type = _checked_warmup(warmup_num_steps, warmup_type)
        _warn_of_a_long_warmup(self.warmup_num_steps, total_num_steps)
        self.org_lrs = _present_rates(self.optimizer)
        self._begin()

    def get_lr_ratio(self) -> float:
        """Return the present fraction of the groups' original rates."""
        iteration = self.last_batch_iteration
        if iteration < 0:
            return 0.0
        shape = Warmup(self.warmup_num_steps, self.warmup_type, DEEPSPEED, "cosine", self.total_num_steps)
        return max(0.0, shape.rate(iteration, self.warmup_min_ratio, 1.0, self.cos_min_ratio))

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


class LRRangeTest(_Schedule):
    """Raises the rate without end, by `lr_range_test_step_rate` × the lowest rate every `lr_range_test_step_size`
    steps, to find the largest rate at which training converges (Smith 2018).
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = _per_group(self.optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _positive("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        self._begin()

    def get_lr(self) -> list[float]:
        factor = range_test_factor(self.last_batch_iteration, self.step_size, self.step_rate, staircase=self.staircase)
        return [low * factor for low in self.min_lr]


class OneCycle(_Schedule):
    """Raises the rate from `cycle_min_lr` to `cycle_max_lr` and lowers it again, then decays it (Smith 2018).

    cycle_first_step_size, cycle_second_step_size: steps of the rise and of the fall, by default equal. The stair counts
    divide them into stairs of constant rate; 0 for none. After the cycle, the rate is `cycle_min_lr` / (1 +
    `decay_lr_rate` × steps since the cycle / `decay_step_size`); a `decay_step_size` of 0 keeps it at `cycle_min_lr`.

    cycle_momentum: also change the first of `betas`, from `cycle_max_mom` to `cycle_min_mom` and back, and set the
    second to 0.99. Without effect if the optimizer has no betas. The first update uses `cycle_min_mom`, as in
    DeepSpeed.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size <= 0 or second < 0:
            raise ConfigError(
                f"the cycle has {cycle_first_step_size} steps up and {second} down: set cycle_first_step_size above 0, "
                "and cycle_second_step_size to 0 or more"
            )
        self.cycle = Cycle(
            float(cycle_first_step_size),
            float(second),
            cycle_first_stair_count,
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count,
            decay_step_size,
        )
        self.min_lrs = _per_group(self.optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _per_group(self.optimizer, cycle_max_lr, "cycle_max_lr")
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_moms = _per_group(self.optimizer, cycle_min_mom, "cycle_min_mom")
        self.max_moms = _per_group(self.optimizer, cycle_max_mom, "cycle_max_mom")
        self.cycle_momentum = cycle_momentum and "betas" in self.optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            name = type(self.optimizer).__name__
            logger.warning("OneCycle leaves the momentum unchanged: %s has no betas. Set cycle_momentum=False.", name)
        self._begin()
        if self.cycle_momentum and last_batch_iteration == -1:
            self._set_momentum([(mom, _CYCLE_BETA2) for mom in self.min_moms])

    def get_lr(self) -> list[float]:
        rate, at = self.cycle.rate, self.last_batch_iteration
        return [rate(at, low, high, self.decay_lr_rate) for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each param_group at `last_batch_iteration`; None without `cycle_momentum`."""
        if not self.cycle_momentum:
            return None
        momentum, at, decay = self.cycle.momentum, self.last_batch_iteration, self.decay_mom_rate
        pairs = zip(self.min_moms, self.max_moms, strict=True)
        return [(momentum(at, low, high, decay), _CYCLE_BETA2) for low, high in pairs]

    def step(self, batch_iteration: int | None = None) -> None:
        """Proceed to the next iteration, or to `batch_iteration`, and set its rates and betas."""
        super().step(batch_iteration)
        betas = self.get_mom()
        if betas is not None:
            self._set_momentum(betas)

    def _set_momentum(self, betas: list[tuple[float, float]]) -> None:
        for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
            group["betas"] = pair


def _torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    raise UsageError(f"optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer")


def _present_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _per_group(optimizer: torch.optim.Optimizer, value: PerGroup, name: str) -> list[float]:
    count = len(optimizer.param_groups)
    if not isinstance(value, (list, tuple)):
        return [value] * count  # type: ignore[list-item]
    if len(value) != count:
        raise ConfigError(f"{name} has {len(value)} values and the optimizer {count} param_groups: give one for each")
    return list(value)


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{name} is {value!r}: give a whole number above 0")
    return value


def _checked_warmup(num_steps: Any, kind: str) -> tuple[int, str]:
    if kind not in WARMUP_TYPES:
        logger.warning("warmup_type is %r, which is neither log nor linear: log is used, as in DeepSpeed", kind)
        kind = WARMUP_TYPES[0]
    return max(2, _positive("warmup_num_steps", num_steps)), kind


def _warn_of_a_long_warmup(warmup: int, total: int) -> None:
    if total < warmup:
        logger.warning(
            "total_num_steps (%d) is less than warmup_num_steps (%d): the rate drops to its lowest value "
            "after the warm-up",
            total,
            warmup,
        )
