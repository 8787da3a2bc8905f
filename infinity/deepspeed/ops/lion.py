"""`DeepSpeedCPULion`."""

from __future__ import annotations

from typing import Any

from infinity.deepspeed.ops.flat import FlatOptimizer, check_moments


class DeepSpeedCPULion(FlatOptimizer):
    """Lion (Chen et al. 2023) for parameters in host memory, with DeepSpeed's arguments and defaults."""

    update_rule = "lion"

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_moments(fp32_optimizer_states)
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)
