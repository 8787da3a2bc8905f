"""Optimizer rules: names, moments and hyper-parameters, as in torch.optim."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, Literal

from infinity.errors import ConfigError

__all__ = ["HYPER_KEYS", "MOMENTS", "MOMENT_NAMES", "ROOTS", "Hyper", "MomentFormat", "Rule"]

Rule = Literal["adam", "adamw", "adagrad", "lion", "sgd"]
MomentFormat = Literal["fp32", "bf16", "8bit"]

MOMENT_NAMES: dict[Rule, tuple[str, ...]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adagrad": ("sum",),
    "lion": ("exp_avg",),
    "sgd": ("momentum_buffer",),
}
"""Rule → names of its moments, as in torch.optim."""
MOMENTS: dict[Rule, int] = {rule: len(names) for rule, names in MOMENT_NAMES.items()}
ROOTS = ("exp_avg_sq", "sum")
"""Moments that are sums or means of squares. Their 8-bit codes hold the square root."""
HYPER_KEYS: dict[Rule, tuple[str, ...]] = {
    "adam": ("lr", "betas", "eps", "weight_decay"),
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "adagrad": ("lr", "lr_decay", "eps", "weight_decay"),
    "lion": ("lr", "betas", "weight_decay"),
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
}
"""Rule → the fields of `Hyper` that it reads, which are the keys of its param_groups, named as in torch.optim."""

_LARGEST = (2 - 2**-23) * 2.0**127
"""The largest fp32."""


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of one parameter group. A rule reads only the fields in `HYPER_KEYS`.

    Raises ConfigError for values out of range.
    """

    rule: Rule = "adamw"
    """adamw and lion decouple the weight decay from the gradient; adam, adagrad and sgd add it to the gradient."""
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    """Read by adam, adamw and lion."""
    eps: float = 1e-8
    """Read by adam, adamw and adagrad."""
    weight_decay: float = 0.01
    momentum: float = 0.0
    """Read by sgd, like dampening and nesterov."""
    dampening: float = 0.0
    nesterov: bool = False
    lr_decay: float = 0.0
    """Read by adagrad."""

    def __post_init__(self) -> None:
        if self.rule not in MOMENTS:
            raise ConfigError(f"rule is {self.rule!r}: give one of {', '.join(MOMENTS)}")
        for name in ("lr", "eps", "weight_decay", "momentum", "lr_decay"):
            value = getattr(self, name)
            if not _is_number(value) or not 0.0 <= value <= _LARGEST:
                raise ConfigError(f"{name} is {value!r}: give a number from 0 to fp32's largest")
        if not _is_number(self.dampening) or not abs(self.dampening) <= _LARGEST:
            raise ConfigError(f"dampening is {self.dampening!r}: give a number in fp32's range")
        if self.lr * self.weight_decay > _LARGEST:
            raise ConfigError(f"lr * weight_decay is {self.lr * self.weight_decay}: give less of one")
        if len(self.betas) != 2 or not all(_is_number(beta) and 0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"betas are {self.betas}: give two numbers in [0, 1)")
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ConfigError("nesterov is True: give a momentum, and no dampening")

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Hyper-parameters as keyword arguments of the native kernels."""
        return {
            "rule": self.rule,
            "lr": self.lr,
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "momentum": self.momentum,
            "dampening": self.dampening,
            "lr_decay": self.lr_decay,
            "nesterov": self.nesterov,
        }


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
