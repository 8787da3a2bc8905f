"""DeepSpeed's optimizers, with its arguments and defaults. Those in host memory use the native kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from infinity.deepspeed.front_ends import check_groups
from infinity.errors import ConfigError, ModelError, UsageError
from infinity.optim.cpu_adam import update_flat
from infinity.optim.cpu_optimizer import CPUAdam
from infinity.rules import RULES, Hyper, RuleName

_MASTER = "master"


class FlatOptimizer(torch.optim.Optimizer):
    """An optimizer of `update_rule` for fp32, bf16 and fp16 parameters on the CPU. Moments are fp32.

    A parameter of 16 bits has an fp32 master in its state, initialised at its first step; values written to the
    parameter later are overwritten. Raises ConfigError for values out of range, ModelError for other parameters.
    """

    update_rule: ClassVar[RuleName]
    """The rule, by which `initialize` knows the optimizer."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, Hyper(self.update_rule, **defaults).by_key())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and return the value of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            hyper = Hyper(self.update_rule, **{name: group[name] for name in RULES[self.update_rule].keys})
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, hyper)
        return loss

    def _update(self, param: Tensor, hyper: Hyper) -> None:
        _check(param)
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(())
            state |= {name: torch.zeros(param.shape) for name in RULES[self.update_rule].moments}
            if param.dtype != torch.float32:
                state[_MASTER] = param.detach().float().contiguous()
        state["step"] += 1
        flat, grad = param.contiguous(), param.grad.contiguous()  # type: ignore[union-attr]
        moments = [state[name] for name in RULES[self.update_rule].moments]
        update_flat(flat, state.get(_MASTER), grad, moments, (), hyper, int(state["step"]))
        if flat is not param:
            param.copy_(flat)
        else:
            torch.autograd.graph.increment_version(param)  # written by address, unseen by autograd


def check_moments(fp32_optimizer_states: bool) -> None:
    """Raise ConfigError if moments in 16 bits are wanted."""
    if not fp32_optimizer_states:
        raise ConfigError("fp32_optimizer_states is False: moments are fp32 here, leave the argument out")


def _check(param: Tensor) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if param.device.type != "cpu" or param.layout != torch.strided or param.dtype not in dtypes:
        raise ModelError(
            f"a parameter of shape {tuple(param.shape)} is {param.dtype}, {param.layout}, on {param.device}: the "
            "optimizer takes dense floating-point parameters in host memory"
        )
    if param.grad is not None and param.grad.layout != torch.strided:
        raise ModelError("a gradient is sparse: construct embeddings with sparse=False")


class DeepSpeedCPUAdam(CPUAdam):
    """AdamW for parameters in host memory, or Adam if adamw_mode is False, with DeepSpeed's arguments and defaults.

    bias_correction: must be True. amsgrad: must be False. fp32_optimizer_states: False keeps moments in bf16, which
    are rounded stochastically. Raises ConfigError, for param_groups of another optimizer too.
    """

    moments_arguments: ClassVar = {"fp32": "fp32_optimizer_states=True", "bf16": "fp32_optimizer_states=False"}
    """Format of moments → the argument that sets it."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _check_bias(bias_correction)
        model_params = list(model_params)
        check_groups(model_params)
        moments = "fp32" if fp32_optimizer_states else "bf16"
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adamw_mode=adamw_mode,
            moments=moments,  # type: ignore[arg-type]
        )

    def step_subgroup(self, subgroup_id: int, closure: Any = None) -> NoReturn:
        """Raise UsageError: DeepSpeed's own ZeRO optimizers call it, on one group of their partitions at a time."""
        self._refuse(f"step_subgroup({subgroup_id})")

    def rollback_subgroup(self, sub_group_id: int, closure: Any = None) -> NoReturn:
        """Raise UsageError: an engine checks gradients before it updates, and takes no update back."""
        self._refuse(f"rollback_subgroup({sub_group_id})")

    def _refuse(self, call: str) -> NoReturn:
        raise UsageError(
            f"DeepSpeedCPUAdam.{call} was called, but there are no sub-groups of partitions here: call step(), which "
            "updates the parameters that have a gradient"
        )


class FusedAdam(torch.optim.AdamW):
    """AdamW on the parameters' device, or Adam if adam_w_mode is False, with DeepSpeed's arguments and defaults.

    bias_correction: must be True. amsgrad: must be False. set_grad_none: `zero_grad` sets gradients to None by
    default; False: to zeros. Raises ConfigError.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _check_bias(bias_correction)
        if amsgrad:
            raise ConfigError("amsgrad is True: FusedAdam does not support it, use torch.optim.AdamW")
        super().__init__(params, lr, betas, eps, weight_decay)
        self.set_grad_none = set_grad_none
        for group in self.param_groups:
            group["decoupled_weight_decay"] = adam_w_mode  # torch's AdamW is its Adam with this key

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


def _check_bias(bias_correction: bool) -> None:
    if not bias_correction:
        raise ConfigError("bias_correction is False: the bias is always corrected, leave the argument out")


class DeepSpeedCPUAdagrad(FlatOptimizer):
    """Adagrad (Duchi, Hazan & Singer 2011) for parameters in host memory, with DeepSpeed's arguments and defaults.

    adamw_mode: no effect; Accelerate passes it to every optimizer of DeepSpeed's.
    """

    update_rule = "adagrad"

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        *,
        adamw_mode: bool = False,
    ) -> None:
        if amsgrad:
            raise ConfigError("amsgrad is True, which Adagrad does not have: leave it out")
        check_moments(fp32_optimizer_states)
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
        first = {group.get("initial_accumulator_value", 0) for group in self.param_groups} - {0}
        if first:
            raise ConfigError(
                f"initial_accumulator_value is {first.pop()}, and DeepSpeedCPUAdagrad starts at 0. Pass "
                "torch.optim.Adagrad to initialize(); with Accelerate and offload_optimizer, set "
                '"zero_force_ds_cpu_optimizer": false in the config.'
            )


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
