"""Sections of the config under DeepSpeed's names, for scripts that validate or read them by themselves.

`initialize` reads the config with `infinity.config`. Keys without effect there have their values here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from infinity.config.precision import BF16, FP16
from infinity.deepspeed.engine_names import GETTERS, OffloadDeviceEnum, scaler_arguments
from infinity.deepspeed.settings import FailedConfigCheck
from infinity.observe.log import logger


class DeepSpeedConfigModel(BaseModel):
    """A section whose fields may be assigned, with DeepSpeed's deprecated fields.

    Values "auto" count as absent, unless `strict` is True. A field with `json_schema_extra` {"deprecated": True,
    "new_param": "b.c"} moves its value to the field `b.c`, through the function `new_param_fn` if there is one.
    `set_new_param` False: it only logs a warning. Raises pydantic's ValidationError, and FailedConfigCheck if both
    fields are set.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**{name: value for name, value in data.items() if strict or value != "auto"})
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                self._move(name, extra)

    def _move(self, name: str, extra: dict[str, Any]) -> None:
        target = extra.get("new_param", "")
        logger.warning("%s is deprecated%s", name, f": use {target}" if target else "")
        if not target or not extra.get("set_new_param", True):
            return
        convert = extra.get("new_param_fn", lambda value: value)
        *sections, last = target.split(".")
        section = reduce(getattr, sections, self)
        if last in section.model_fields_set:
            raise FailedConfigCheck(f"{name} is deprecated, and {target} is set, too: remove {name}")
        setattr(section, last, convert(getattr(self, name)))


DEFAULT_LEAF_MODULE_CLASSES = [
    f"transformers.models.{module}.modeling_{module}.{name}SparseMoeBlock"
    for module, name in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


def _listed(value: object) -> object:
    """Return one text as a list, and a list without repetitions."""
    if isinstance(value, str):
        return [value]
    return list(dict.fromkeys(value)) if isinstance(value, list) else value


_Names = Annotated[list[str], BeforeValidator(_listed)]


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """Classes, names and suffixes of names of leaf modules, with DeepSpeed's defaults."""

    classes: _Names = Field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_CLASSES))
    names: _Names = Field(default_factory=list)
    name_suffixes: _Names = Field(default_factory=list)


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


def _on_cpu(section: type[DeepSpeedConfigModel], on: bool) -> DeepSpeedConfigModel | None:
    return section.model_validate({"device": "cpu"}) if on else None


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

    cpu_offload: bool | None = _replaced_by("offload_optimizer", partial(_on_cpu, DeepSpeedZeroOffloadOptimizerConfig))
    cpu_offload_param: bool | None = _replaced_by("offload_param", partial(_on_cpu, DeepSpeedZeroOffloadParamConfig))
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
        return scaler_arguments(self, self.initial_dynamic_scale())


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Return section `bf16` of a whole config, or its older name `bfloat16`."""
    section = param_dict.get(BFLOAT16)
    return DeepSpeedBF16Config(**(param_dict.get(BFLOAT16_OLD, {}) if section is None else section))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Return section `fp16` of a whole config."""
    return DeepSpeedFP16Config(**param_dict.get(_FP16, {}))
