"""`DeepSpeedCPUAdagrad`."""

from __future__ import annotations

from typing import Any

from infinity.deepspeed.ops.flat import FlatOptimizer, check_moments
from infinity.errors import ConfigError


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
