"""`DeepSpeedCPULion` and `FusedLion`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from infinity.deepspeed.ops.flat import FlatOptimizer, check_moments
from infinity.rules import Hyper, RuleName


class DeepSpeedCPULion(FlatOptimizer):
    """Lion (Chen et al. 2023) for parameters in host memory, with DeepSpeed's arguments and defaults.

    adamw_mode: no effect; Accelerate passes it to every optimizer of DeepSpeed's.
    """

    update_rule = "lion"

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
        *,
        adamw_mode: bool = False,
    ) -> None:
        check_moments(fp32_optimizer_states)
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)


class FusedLion(torch.optim.Optimizer):
    """Lion on the parameters' device, with DeepSpeed's arguments and defaults. The momentum has the parameter's dtype.

    set_grad_none: `zero_grad` sets gradients to None by default; False: to zeros. Raises ConfigError.
    """

    update_rule: ClassVar[RuleName] = "lion"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        hyper = Hyper("lion", lr=lr, betas=betas, weight_decay=weight_decay)
        self.set_grad_none = set_grad_none
        super().__init__(params, hyper.by_key())

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and return the value of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(param)
                    _lion(param, param.grad, state["exp_avg"], group)
        return loss


def _lion(param: Tensor, grad: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
    """Update `param` and `momentum` in place, in fp32."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    gradient, mean = grad.float(), momentum.float()
    direction = torch.lerp(gradient, mean, beta1).sign_()
    param.copy_(param.float().mul_(1 - lr * group["weight_decay"]).sub_(direction, alpha=lr))
    momentum.copy_(torch.lerp(mean, gradient, 1 - beta2))
