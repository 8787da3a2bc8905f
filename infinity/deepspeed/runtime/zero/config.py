"""Section `zero_optimization` under DeepSpeed's names, for scripts that validate or read it by themselves.

`initialize` reads the config with `infinity.config`. Keys without effect there have their values here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from pydantic import Field, create_model, model_validator

from infinity.deepspeed.engine_names import GETTERS
from infinity.deepspeed.offload_names import OffloadDeviceEnum
from infinity.deepspeed.runtime.config_utils import DeepSpeedConfigModel
from infinity.deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig

ZERO_OPTIMIZATION = "zero_optimization"
_PREFIX = "stage3_"


class ZeroStageEnum(IntEnum):
    """Stages of ZeRO, by the states that are sharded."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedZeroOffloadParamConfig(DeepSpeedConfigModel):
    """Section `offload_param`, with DeepSpeed's defaults."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = Field(5, ge=0)
    buffer_size: int = Field(100_000_000, ge=0)
    max_in_cpu: int = Field(1_000_000_000, ge=0)
    pin_memory: bool = True


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """Section `offload_optimizer`, with DeepSpeed's defaults."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = Field(4, ge=0)
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = Field(1.0, ge=0, le=1)
    super_offload: bool = False
    cpuadam_cores_perc: float = Field(0.8, ge=0, le=1)

    @property
    def pipeline(self) -> bool:
        """True if reads or writes of states overlap the update."""
        return self.pipeline_read or self.pipeline_write


def _plain_fields() -> dict[str, Any]:
    """Return the fields of the keys that the engine's methods report, with their defaults. Keys of stage 3 have both
    of DeepSpeed's names.
    """
    fields: dict[str, Any] = {}
    for key, default in GETTERS.values():
        section, _, name = key.rpartition(".")
        if section == ZERO_OPTIMIZATION and default is not None:
            least = 0 if type(default) is int else None
            short = name.removeprefix(_PREFIX)
            fields[short] = (type(default), Field(default, ge=least, alias=name if name != short else None))
    return fields


_Plain: Any = create_model("_Plain", __base__=DeepSpeedConfigModel, **_plain_fields())


def _replaced_by(target: str, convert: Any = None, moves: bool = True) -> Any:
    extra: dict[str, Any] = {"deprecated": True, "new_param": target, "set_new_param": moves}
    return Field(None, json_schema_extra=extra | ({} if convert is None else {"new_param_fn": convert}))


def _param_on_cpu(on: bool) -> DeepSpeedZeroOffloadParamConfig | None:
    return DeepSpeedZeroOffloadParamConfig.model_validate({"device": "cpu"}) if on else None


def _optimizer_on_cpu(on: bool) -> DeepSpeedZeroOffloadOptimizerConfig | None:
    return DeepSpeedZeroOffloadOptimizerConfig.model_validate({"device": "cpu"}) if on else None


class DeepSpeedZeroConfig(_Plain):  # type: ignore[misc]  # made above
    """Section `zero_optimization`, with DeepSpeed's defaults. Raises pydantic's ValidationError."""

    stage: ZeroStageEnum = ZeroStageEnum.disabled
    overlap_comm: bool | None = None
    """None: True in stage 3."""
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    use_all_reduce_for_fetch_params: bool = Field(False, alias="stage3_use_all_reduce_for_fetch_params")
    zenflow: dict[str, Any] | None = None
    zeropp_loco_param: dict[str, Any] | None = None
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(default_factory=DeepSpeedZeroLeafModuleConfig)
    mics_shard_size: int = -1
    mics_hierarchical_params_gather: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True

    cpu_offload: bool | None = _replaced_by("offload_optimizer", _optimizer_on_cpu)
    cpu_offload_param: bool | None = _replaced_by("offload_param", _param_on_cpu)
    cpu_offload_use_pin_memory: bool | None = _replaced_by("offload_param or offload_optimizer", moves=False)
    stage3_gather_fp16_weights_on_model_save: bool | None = _replaced_by("gather_16bit_weights_on_model_save")

    @model_validator(mode="before")
    @classmethod
    def _overlap_in_stage_3(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("overlap_comm") is None:
            return {**data, "overlap_comm": data.get("stage", 0) == ZeroStageEnum.weights}
        return data


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Return section `zero_optimization` of a whole config; true is stage 1."""
    section = param_dict.get(ZERO_OPTIMIZATION, {})
    return DeepSpeedZeroConfig(**({"stage": int(section)} if isinstance(section, bool) else section))
