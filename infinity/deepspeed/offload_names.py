"""Names of devices and states in the arguments of `offload_states`."""

from __future__ import annotations

from enum import Enum


class OffloadDeviceEnum(str, Enum):
    """Destination of offloaded states."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Names of states for `engine.offload_states`. lp: in the model's dtype; hp: in fp32."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
