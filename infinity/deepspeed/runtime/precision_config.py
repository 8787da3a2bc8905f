"""Sections `bf16` and `fp16` under DeepSpeed's names, for scripts that validate or read them by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict

from infinity.config.precision import BF16, FP16
from infinity.deepspeed.runtime.config_utils import DeepSpeedConfigModel

BFLOAT16 = "bf16"
BFLOAT16_OLD = "bfloat16"
_FP16 = "fp16"

_OPEN = ConfigDict(frozen=False, defer_build=False)


class DeepSpeedBF16Config(DeepSpeedConfigModel, BF16):
    """Section `bf16` with the keys that only DeepSpeed has. Raises pydantic's ValidationError."""

    model_config = _OPEN

    immediate_grad_update: bool = False
    check_grad_overflow: bool = True


class DeepSpeedFP16Config(DeepSpeedConfigModel, FP16):
    """Section `fp16` with the keys that only DeepSpeed has. Raises pydantic's ValidationError."""

    model_config = _OPEN

    fp16_master_weights_and_grads: bool = False

    def initial_dynamic_scale(self) -> int:
        return int(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the dynamic scale's parameters, under the names of DeepSpeed's loss scaler."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Return section `bf16` of a whole config, or its older name `bfloat16`."""
    section = param_dict.get(BFLOAT16)
    return DeepSpeedBF16Config(**(param_dict.get(BFLOAT16_OLD, {}) if section is None else section))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Return section `fp16` of a whole config."""
    return DeepSpeedFP16Config(**param_dict.get(_FP16, {}))
