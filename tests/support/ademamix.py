"""AdEMAMix (Pagliardini, Ablin & Grangier 2024) in torch's operations, by the paper's formulas."""

from __future__ import annotations

import math
from typing import Any

import torch


class AdEMAMix(torch.optim.Optimizer):
    """Constants as in bitsandbytes, states named as in the authors' code."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "alpha": alpha, "t_alpha": t_alpha, "t_beta3": t_beta3, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state |= {name: torch.zeros_like(p) for name in ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq")}
        state["step"] += 1
        step = int(state["step"])
        (one, two, three), alpha = group["betas"], group["alpha"]
        if group["t_alpha"] is not None:
            alpha = min(step * alpha / group["t_alpha"], alpha)
        if group["t_beta3"] is not None:
            first, last, part = math.log(one), math.log(three), step / group["t_beta3"]
            three = min(math.exp(first * last / ((1 - part) * last + part * first)), three)
        fast, slow, square = (state[name] for name in ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq"))
        fast.mul_(one).add_(p.grad, alpha=1 - one)
        slow.mul_(three).add_(p.grad, alpha=1 - three)
        square.mul_(two).addcmul_(p.grad, p.grad, value=1 - two)
        denominator = (square.sqrt() / math.sqrt(1 - two**step)).add_(group["eps"])
        update = (fast / (1 - one**step) + alpha * slow) / denominator
        p.sub_(group["lr"] * (update + group["weight_decay"] * p))
