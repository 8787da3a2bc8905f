"""Optimizers of torch.optim and of a user, and the plain loop that an engine with them has to equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from infinity.config import Config
from infinity.optim.parameter_rule import round_master
from support.loops import Batches, Result

Make = Callable[[nn.Module], list[optim.Optimizer]]


class Sluggish(optim.Optimizer):
    """A user's optimizer: a count as a Python number, a list of states, one that appears late, and `.data` assigned."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"count": 0, "sums": [torch.zeros(p.shape[0], device=p.device), None]}
                state["count"] += 1
                state["sums"][0] += p.grad.reshape(p.shape[0], -1).sum(1)
                if state["count"] == 2:
                    state["late"] = torch.zeros_like(p)
                if "late" in state:
                    state["late"] = state["late"] + p.grad
                p.data = p.data - group["lr"] / state["count"] * (p.grad + state.get("late", 0.0))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.dim() == 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.dim() != 2]


def _one(make: Callable[..., optim.Optimizer]) -> Make:
    return lambda model: [make([p for p in model.parameters() if p.requires_grad])]


def _muon(model: nn.Module) -> list[optim.Optimizer]:
    return [optim.Muon(matrices(model), lr=2e-2), optim.NAdam(others(model), lr=2e-3)]


OPTIMIZERS: dict[str, Make] = {
    "AdamW amsgrad": _one(partial(optim.AdamW, lr=2e-3, amsgrad=True, foreach=True)),
    "Adam maximize": _one(partial(optim.Adam, lr=2e-3, maximize=True)),
    "NAdam": _one(partial(optim.NAdam, lr=2e-3, decoupled_weight_decay=True, weight_decay=0.1)),
    "RAdam": _one(partial(optim.RAdam, lr=2e-3)),
    "Adamax": _one(partial(optim.Adamax, lr=2e-3)),
    "Adadelta": _one(optim.Adadelta),
    "Adafactor": _one(optim.Adafactor),
    "RMSprop": _one(partial(optim.RMSprop, lr=1e-3, momentum=0.9, centered=True)),
    "Rprop": _one(optim.Rprop),
    "ASGD": _one(partial(optim.ASGD, lr=1e-2)),
    "Muon": _muon,
    "a user's": _one(Sluggish),
}


def plain(
    model: nn.Module,
    make: Make,
    batches: Batches,
    config: Config,
    *,
    scales: Sequence[float] = (),
    loss_scale: float = 1.0,
) -> Result:
    """Train in the config's dtype, with fp32 masters, by the optimizers themselves.

    scales: the factor of each step's gradients; by default 1. loss_scale: constant, in fp16.
    """
    dtype = torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else torch.float32
    names = {id(p): name for name, p in model.named_parameters()}
    computes = {name: p.detach().clone().to(dtype).requires_grad_() for name, p in model.named_parameters()}
    optimizers = make(model)  # over the fp32 values
    accumulation = config.resolve_batch(1).accumulation
    losses = []
    for number, batch in enumerate(batches, 1):
        loss = torch.func.functional_call(model, computes, batch)
        (loss * (loss_scale / accumulation)).backward()
        losses.append(loss.item())
        for name, master in model.named_parameters():
            gradient = computes[name].grad
            if gradient is not None:
                computes[name].grad = None
                master.grad = gradient.float() if master.grad is None else master.grad + gradient.float()
        if number % accumulation:
            continue
        factor = (scales[number // accumulation - 1] if scales else 1.0) / loss_scale
        for master in model.parameters():
            if master.grad is not None and factor != 1.0:
                master.grad = master.grad * factor
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                if dtype == torch.float32:
                    computes[names[id(p)]].copy_(p)
                else:
                    round_master(p.detach(), computes[names[id(p)]].detach())
    return Result(losses, {name: p.detach().clone() for name, p in computes.items()})


def coefficients(norms: Sequence[float | None], clip: float) -> list[float]:
    """Return the factors by which an engine clips gradients of these norms."""
    return [min(1.0, clip / ((norm or 0.0) + 1e-6)) for norm in norms]
