"""`DeepSpeedCPUAdam` and `FusedAdam` over `infinity.optim.CPUAdam`."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch

from infinity.deepspeed.front_ends import check_groups
from infinity.errors import ConfigError, UsageError
from infinity.optim.cpu_optimizer import CPUAdam


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
        _check(bias_correction)
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
        _check(bias_correction)
        if amsgrad:
            raise ConfigError("amsgrad is True: FusedAdam does not support it, use torch.optim.AdamW")
        super().__init__(params, lr, betas, eps, weight_decay)
        self.set_grad_none = set_grad_none
        for group in self.param_groups:
            group["decoupled_weight_decay"] = adam_w_mode  # torch's AdamW is its Adam with this key

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


def _check(bias_correction: bool) -> None:
    if not bias_correction:
        raise ConfigError("bias_correction is False: the bias is always corrected, leave the argument out")
