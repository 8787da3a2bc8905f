"""`DeepSpeedConfig` and its error."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

from torch import nn

from infinity.deepspeed.engine_names import GETTERS, read
from infinity.deepspeed.settings import config_checks, make_config, read_settings, without_auto_schedule
from infinity.errors import ConfigError
from infinity.inputs import number_of
from infinity.rules import RULES

if TYPE_CHECKING:
    from infinity.deepspeed.sections import DeepSpeedBF16Config, DeepSpeedFP16Config, DeepSpeedZeroConfig

DeepSpeedConfigError = ConfigError

DEEPSPEED_OPTIMIZERS = [rule.name for rule in RULES.values() if rule.is_deepspeeds]
"""Names in `optimizer.type` that are supported, in lower case. DeepSpeed's list has others, too."""


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """Return the largest norm of the gradient in the config `param_dict`."""
    return float(read(param_dict, "gradient_clipping", 1.0))


def get_log_level(param_dict: Mapping[str, Any]) -> str | None:
    """Return the log level in the config `param_dict`, which has no effect here."""
    level: str | None = read(param_dict, *GETTERS["log_level"])
    return level


class DeepSpeedConfig:
    """A validated DeepSpeed config for `world_size` ranks, with its batch sizes resolved.

    config: a dict or the path of a JSON file. mpu, mesh_device: must be None. Raises ConfigError. Batch sizes are None
    as long as "auto" leaves them open; other keys that are "auto" have their defaults.

    Attributes: `train_batch_size`, `train_micro_batch_size_per_gpu`, `gradient_accumulation_steps`,
    `gradient_clipping`, `gradient_allreduce_op`, `zero_optimization_stage`, `zero_enabled`, `optimizer_name`,
    `optimizer_params`, `scheduler_name`, `scheduler_params`, and `param_dict`, the config in DeepSpeed's keys. Sections
    under DeepSpeed's names: `zero_config`, `bfloat16_config` and `float16_config`.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | PathLike[str],
        mpu: Any = None,
        mesh_device: Any = None,
        world_size: int = 0,
    ) -> None:
        if mpu is not None or mesh_device is not None:
            raise ConfigError("mpu and mesh_device have no counterpart here: leave them out")
        self.param_dict = read_settings(config)
        resolved = make_config(without_auto_schedule(self.param_dict), nn.Module())
        self.world_size = world_size or number_of("WORLD_SIZE", 1, least=1)
        self.train_batch_size: int | None = None
        self.train_micro_batch_size_per_gpu: int | None = None
        self.gradient_accumulation_steps: int | None = None
        sizes = (resolved.train_batch_size, resolved.train_micro_batch_size_per_gpu)
        names = ("train_batch_size", "train_micro_batch_size_per_gpu")
        is_auto = any(self.param_dict.get(name) == "auto" for name in names)
        if not is_auto or any(size is not None for size in sizes):
            with config_checks():
                batch = resolved.resolve_batch(self.world_size)
            self.train_micro_batch_size_per_gpu = batch.micro
            self.gradient_accumulation_steps = batch.accumulation
            self.train_batch_size = batch.micro * batch.accumulation * self.world_size
        self.gradient_clipping = resolved.gradient_clipping
        self.gradient_allreduce_op = resolved.gradient_allreduce_op
        self.zero_optimization_stage = int(resolved.zero_optimization.stage)
        self.zero_enabled = self.zero_optimization_stage > 0
        self.optimizer_name = (self.param_dict.get("optimizer") or {}).get("type")
        self.optimizer_params = read(self.param_dict, *GETTERS["optimizer_params"])
        self.scheduler_name = read(self.param_dict, *GETTERS["scheduler_name"])
        self.scheduler_params = read(self.param_dict, *GETTERS["scheduler_params"])

    @cached_property
    def zero_config(self) -> DeepSpeedZeroConfig:
        from infinity.deepspeed.sections import get_zero_config  # here, since pydantic takes long to import

        return get_zero_config(self.param_dict)

    @cached_property
    def bfloat16_config(self) -> DeepSpeedBF16Config:
        from infinity.deepspeed.sections import get_bfloat16_config

        return get_bfloat16_config(self.param_dict)

    @cached_property
    def float16_config(self) -> DeepSpeedFP16Config:
        from infinity.deepspeed.sections import get_float16_config

        return get_float16_config(self.param_dict)
