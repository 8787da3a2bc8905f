"""Optimizers of the plain loop: torch's, and the engine's kernels on plain tensors for bit-identical comparisons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from infinity.optim.cpu_adam import sum_of_squares, update_flat
from infinity.optim.moments import zero_moments
from infinity.rules import RULES, Hyper
from infinity.sizes import sum_in_order

# eps is far above rounding errors: the sign of a gradient that is zero up to rounding must not decide a step.
PARAMS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 5e-3, "eps": 1e-4, "weight_decay": 0.02},
    "Adam": {"lr": 5e-3, "eps": 1e-4, "weight_decay": 0.01},
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "SGD nesterov": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr": 0.02, "eps": 1e-3},
    "Lion": {"lr": 2e-3, "weight_decay": 0.1, "betas": (0.9, 0.99)},
}
"""Constants of each optimizer, by the names of torch.optim and of the engine's config."""


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023), which torch does not have."""

    def __init__(self, params: Any, lr: float, weight_decay: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(one * mean + (1 - one) * p.grad), alpha=-group["lr"])
                mean.mul_(two).add_(p.grad, alpha=1 - two)


class Kernels(torch.optim.Optimizer):
    """A rule carried out by the engine's own kernel on ordinary tensors; `clip`: largest norm of all gradients."""

    def __init__(self, params: Any, rule: str, clip: float, **given: Any) -> None:
        self.rule, self.clip = rule, clip
        defaults = Hyper(rule=rule, **given)  # type: ignore[arg-type]
        super().__init__(params, defaults.by_key())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        scale = 1.0
        if self.clip:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = sum_in_order(sum_of_squares(g.contiguous().view(-1), threads=1) for g in gradients) ** 0.5
            scale = min(1.0, self.clip / (norm + 1e-6))
        for group in self.param_groups:
            hyper = Hyper(rule=self.rule, **{n: group[n] for n in RULES[self.rule].keys})  # type: ignore[arg-type,index]
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._update(p, hyper, scale)

    def _update(self, p: torch.Tensor, hyper: Hyper, scale: float) -> None:
        state = self.state[p]
        if not state:
            state["step"], state["moments"] = 0, zero_moments(hyper.rule, p.numel(), "fp32")[0]
        state["step"] += 1
        flat, grad = p.detach().contiguous().view(-1).clone(), p.grad.contiguous().view(-1)  # type: ignore[union-attr]
        update_flat(flat, None, grad, state["moments"], [], hyper, state["step"], grad_scale=scale, threads=1)
        p.copy_(flat.view(p.shape))


class Masters:
    """fp32 masters of a model's 16-bit parameters, as a loop in mixed precision keeps them."""

    def __init__(self, model: torch.nn.Module, loss_scale: float) -> None:
        self._loss_scale = loss_scale
        self._masters = {p: p.detach().float().requires_grad_(p.requires_grad) for p in model.parameters()}

    def __getitem__(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._masters[parameter]  # type: ignore[index]

    def collect(self) -> None:
        """Add the gradients of a backward to the masters' gradients."""
        for parameter, master in self._masters.items():
            if parameter.grad is not None:
                gradient = parameter.grad.float() / self._loss_scale
                master.grad = gradient if master.grad is None else master.grad + gradient
                parameter.grad = None

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy elements that the model's code has edited into the masters."""
        for parameter, master in self._masters.items():
            master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.float()))

    @torch.no_grad()
    def publish(self) -> None:
        for parameter, master in self._masters.items():
            if parameter.is_floating_point() and master.requires_grad:
                parameter.copy_(master)

    def drop(self) -> None:
        for master in self._masters.values():
            master.grad = None


def plain_optimizer(kind: str, groups: Iterable[Any], clip: float, *, exact: bool) -> torch.optim.Optimizer:
    """Construct torch's optimizer of this kind. exact: use the engine's kernels instead, clipping included."""
    params = PARAMS[kind]
    name = kind.split()[0]
    if exact:
        return Kernels(groups, name.lower(), clip, **{"weight_decay": 0.0, **params})
    classes: dict[str, Any] = {
        "AdamW": torch.optim.AdamW,
        "Adam": torch.optim.Adam,
        "SGD": torch.optim.SGD,
        "Adagrad": torch.optim.Adagrad,
        "Lion": Lion,
    }
    made: torch.optim.Optimizer = classes[name](groups, **params)
    return made
