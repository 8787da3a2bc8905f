"""Base of optimizers in host memory that update each parameter with one call of the native kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from infinity.errors import ConfigError, ModelError
from infinity.optim.cpu_adam import update_flat
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
