"""Methods of DeepSpeed's engine that report its config: ranks, stages, tiers, dtypes, and values of the JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from infinity.deepspeed.engine_names import GETTERS, REFUSED, read, scaler_arguments
from infinity.deepspeed.module import EngineModule
from infinity.engine.base import BaseEngine
from infinity.errors import UsageError
from infinity.inputs import number_of
from infinity.plan.policy import DTYPES
from infinity.rules import rule_of_type

_SAFE_MODULES = [f"torch.nn.modules.{name}" for name in ("linear.Linear", "conv.Conv1d", "conv.Conv2d", "conv.Conv3d")]
"""DeepSpeed's default of `torch_autocast.lower_precision_safe_modules`."""


class ReportingEngine(EngineModule):
    """Reports the config of `engine`. Methods of DeepSpeed's engine that have no counterpart raise UsageError."""

    def __init__(self, engine: BaseEngine, settings: Mapping[str, Any], client_optimizer: Any) -> None:
        """settings: the config in DeepSpeed's keys."""
        super().__init__(engine)
        self.client_optimizer = client_optimizer
        """The optimizer that the script passed to `initialize`, or None."""
        self.config = dict(settings)
        """The config as a dict, as DeepSpeed has it."""

    @property
    def world_size(self) -> int:
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

    @property
    def dp_world_size(self) -> int:
        return self._engine.ranks.size

    @property
    def global_rank(self) -> int:
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    @property
    def local_rank(self) -> int:
        return number_of("LOCAL_RANK", 0)

    def get_data_parallel_rank(self) -> int:
        return self._engine.ranks.rank

    def optimizer_name(self) -> str | None:
        """Return the class of the script's optimizer, else the config's optimizer.type, in lower case if it is one of
        DeepSpeed's own.
        """
        if self.client_optimizer is not None:
            return type(self.client_optimizer).__name__
        name: str | None = read(self.config, "optimizer.type")
        rule = rule_of_type(name or "")
        return name if rule is None or not rule.is_deepspeeds else rule.name

    def gradient_clipping(self) -> float:
        return self._engine.config.gradient_clipping

    def dynamic_loss_scale(self) -> bool:
        return self._engine.config.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        return 2.0**self._engine.config.fp16.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        return scaler_arguments(self._engine.config.fp16, self.initial_dynamic_scale())

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        return int(self._engine.config.zero_optimization.stage)

    def zero_optimization_partition_gradients(self) -> bool:
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.zero_optimization_stage() >= 3

    def is_first_weights_partition_group(self) -> bool:
        return self.zero_optimization_partition_weights()

    def zero_use_cpu_optimizer(self) -> bool:
        return self._optimizer_tier() in ("cpu", "nvme")

    def zero_cpu_offload(self) -> bool:
        return self._optimizer_tier() == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        return self._optimizer_tier() == "nvme"

    def _optimizer_tier(self) -> str:
        return str(self._engine.config.zero_optimization.offload_optimizer.device)

    def zero_overlap_comm(self) -> bool:
        """Return True: transfers and collectives overlap the computation."""
        return True

    def fp16_enabled(self) -> bool:
        return self._engine.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self._engine.config.bf16.enabled

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype of section `torch_autocast`; None if it has none."""
        name = self._engine.config.torch_autocast.dtype
        return None if name is None else DTYPES[name]

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        """Return the config's list, by default linear layers and convolutions. It has no effect: gradients are reduced
        in `communication_data_type`.
        """
        names = read(self.config, "torch_autocast.lower_precision_safe_modules")
        return list(_SAFE_MODULES) if names is None else list(names)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of the model and that in which gradients of micro-batches accumulate."""
        return self._model_dtype(), DTYPES[self._engine.config.data_types.grad_accum_dtype]

    def _model_dtype(self) -> torch.dtype:
        if self.fp16_enabled():
            return torch.float16
        return torch.bfloat16 if self.bfloat16_enabled() else torch.float32

    @property
    def communication_data_type(self) -> torch.dtype:
        """Dtype in which gradients are reduced: the config's, else the model's."""
        name = self._engine.config.communication_data_type
        return DTYPES[name] if name is not None else self._model_dtype()

    def postscale_gradients(self) -> bool:
        return not read(self.config, "prescale_gradients", False)


def _getter(name: str, key: str, default: Any) -> Callable[[ReportingEngine], Any]:
    def get(self: ReportingEngine) -> Any:
        return read(self.config, key, default)

    get.__name__ = name
    get.__doc__ = f"Return the config's `{key}`; {default!r} by default."
    return get


def _refusal(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(f"engine.{name}() of DeepSpeed has no counterpart here: {instead}")

    refuse.__name__ = name
    refuse.__doc__ = f"Raise UsageError: {instead}."
    return refuse


for _name, _reads in GETTERS.items():
    setattr(ReportingEngine, _name, _getter(_name, *_reads))
for _name, _instead in REFUSED.items():
    setattr(ReportingEngine, _name, _refusal(_name, _instead))
