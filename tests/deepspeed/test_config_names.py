"""Names that scripts import from DeepSpeed's config modules: constants, sections and the base of sections."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from infinity.deepspeed.ops.adam import DeepSpeedCPUAdam
from infinity.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from infinity.deepspeed.runtime import config as runtime_config, constants, lr_schedules
from infinity.deepspeed.runtime.config import DeepSpeedConfig
from infinity.deepspeed.runtime.config_utils import DeepSpeedConfigModel
from infinity.deepspeed.runtime.precision_config import (
    DeepSpeedBF16Config,
    DeepSpeedFP16Config,
    get_bfloat16_config,
    get_float16_config,
)
from infinity.deepspeed.runtime.zero.config import (
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    ZeroStageEnum,
    get_zero_config,
)
from infinity.deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES
from infinity.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from pydantic import Field, ValidationError
from torch import nn

import infinity
import infinity.deepspeed as deepspeed
from infinity.config import Config
from infinity.deepspeed.accelerator import Accelerator
from infinity.deepspeed.engine_names import GETTERS
from infinity.errors import ConfigError, UsageError
from infinity.rules import RULES
from support.models import token_batches


class Old(DeepSpeedConfigModel):
    """A section with a deprecated field, as libraries declare them."""

    new: list[int] | None = None
    old: int | None = Field(
        None, json_schema_extra={"deprecated": True, "new_param": "new", "new_param_fn": lambda value: [value]}
    )
    kept: int = Field(0, alias="kept_alias")


# -- constants ---------------------------------------------------------------------------------------------------------


def test_constants_of_schedules_are_the_names_of_parameters() -> None:
    """Each constant is a parameter of a schedule in the config, a type of one, or a type of warm-up."""
    from infinity.config.optimization import (
        LRRangeTestParams,
        OneCycleParams,
        WarmupCosineLRParams,
        WarmupDecayLRParams,
    )

    sections = (LRRangeTestParams, OneCycleParams, WarmupCosineLRParams, WarmupDecayLRParams)
    known = {name for section in sections for name in section.model_fields}
    known |= {"lr_schedule", "log", "linear", *lr_schedules.VALID_LR_SCHEDULES}
    constants = {name: value for name, value in vars(lr_schedules).items() if name.isupper() and name[0] != "_"}
    strings = {value for value in constants.values() if isinstance(value, str)}
    assert known - strings == {"cycle_momentum"} and strings <= known  # DeepSpeed has no constant for it
    assert lr_schedules.CYCLE_MIN_LR == "cycle_min_lr" and lr_schedules.WARMUP_LINEAR_RATE == "linear"


def test_constants_of_optimizers_are_types_of_the_config() -> None:
    for name in runtime_config.DEEPSPEED_OPTIMIZERS:
        assert Config.load({"optimizer": {"type": name}}).optimizer.type.lower() == name
    with pytest.raises(ConfigError, match="AdamW is the nearest"):
        Config.load({"optimizer": {"type": runtime_config.LAMB_OPTIMIZER}})


def test_constants_of_keys_are_keys_of_the_config() -> None:
    documented = Path(__file__).parents[2].joinpath("docs/config.md").read_text(encoding="utf-8")
    for name, value in vars(constants).items():
        if name.isupper() and not name.startswith("ROUTE_") and not name.endswith("_DEFAULT"):
            assert re.search(rf"^\| `{value}[.`]", documented, re.MULTILINE), name


def test_keys_of_a_config_that_is_not_loaded() -> None:
    assert runtime_config.get_gradient_clipping({}) == 1 and runtime_config.get_log_level({}) is None
    config = {"gradient_clipping": 0, "log_level": "ERROR"}
    assert runtime_config.get_gradient_clipping(config) == 0 and runtime_config.get_log_level(config) == "ERROR"


# -- sections ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["loss_scale_window", "min_loss_scale"])
@pytest.mark.parametrize("value", [0, -1, True, float("nan"), "text", None])
def test_bounds_of_the_loss_scale_are_checked_where_they_are_used(field: str, value: Any) -> None:
    """Bounds of a dynamic scale are positive; those of a constant scale, or of no fp16 training, are any numbers."""
    with pytest.raises(ValidationError):
        DeepSpeedFP16Config(enabled=True, **{field: value})
    for unused in ({"enabled": True, "loss_scale": 128}, {"enabled": False}):
        if value in (0, -1) and value is not False:
            assert getattr(DeepSpeedFP16Config(**unused, **{field: value}), field) == value
            assert getattr(Config.load({"fp16": {**unused, field: value}}).fp16, field) == value
        else:
            with pytest.raises(ValidationError):
                DeepSpeedFP16Config(**unused, **{field: value})


def test_the_engines_config_names_a_bound_out_of_range() -> None:
    with pytest.raises(ConfigError, match=r"fp16.*loss_scale_window must be at least 1, not 0"):
        Config.load({"fp16": {"enabled": True, "loss_scale_window": 0}})
    with pytest.raises(ConfigError, match=r"fp16\.loss_scale: must be a number, not \[\]"):
        Config.load({"fp16": {"enabled": True, "loss_scale": []}})


def test_precision_sections_have_the_values_of_a_whole_config() -> None:
    config = {"bfloat16": {"enabled": True}, "fp16": {"enabled": "auto", "initial_scale_power": 4}}
    assert get_bfloat16_config(config).enabled and not get_bfloat16_config({}).enabled
    fp16 = get_float16_config(config)
    assert not fp16.enabled and fp16.initial_dynamic_scale() == 16
    assert fp16.dynamic_loss_scale_args()["init_scale"] == 16
    fp16.enabled = True  # sections may be changed
    assert fp16.enabled and DeepSpeedBF16Config().check_grad_overflow


def test_the_zero_section_has_deepspeeds_defaults_and_both_names_of_keys() -> None:
    for stage in ZeroStageEnum:
        assert DeepSpeedZeroConfig(stage=stage).overlap_comm is (stage == 3)
    defaults = DeepSpeedZeroConfig()
    for key, default in GETTERS.values():
        section, _, name = key.rpartition(".")
        if section == "zero_optimization" and default is not None:
            assert getattr(defaults, name.removeprefix("stage3_")) == default
    for name in ("stage3_prefetch_bucket_size", "prefetch_bucket_size"):
        assert DeepSpeedZeroConfig(**{name: 12}).prefetch_bucket_size == 12
    with pytest.raises(ValidationError):
        DeepSpeedZeroConfig(prefetch_bucket_size=-1)
    with pytest.raises(ValidationError):
        DeepSpeedZeroConfig(no_such_key=1)


def test_leaf_modules_are_lists_of_names() -> None:
    assert DeepSpeedZeroConfig().leaf_module.classes == DEFAULT_LEAF_MODULE_CLASSES
    assert all(name.endswith("SparseMoeBlock") for name in DEFAULT_LEAF_MODULE_CLASSES)
    leaf = DeepSpeedZeroConfig(leaf_module={"classes": ["A", "B", "A"], "names": "layer.0"}).leaf_module
    assert (leaf.classes, leaf.names, leaf.name_suffixes) == (["A", "B"], ["layer.0"], [])
    with pytest.raises(ValidationError):
        DeepSpeedZeroConfig(leaf_module="A")


def test_offload_sections_and_their_old_switches() -> None:
    assert DeepSpeedZeroConfig().offload_param is None
    config = DeepSpeedZeroConfig(offload_param={}, cpu_offload=True, stage3_gather_fp16_weights_on_model_save=True)
    assert isinstance(config.offload_param, DeepSpeedZeroOffloadParamConfig)
    assert isinstance(config.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    assert config.offload_optimizer.device == OffloadDeviceEnum.cpu and config.gather_16bit_weights_on_model_save
    assert not DeepSpeedZeroOffloadOptimizerConfig().pipeline
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_write=True).pipeline
    assert get_zero_config({"zero_optimization": True}).stage == 1 and get_zero_config({}).stage == 0


def test_a_section_moves_deprecated_fields() -> None:
    """A deprecated field sets its successor; both together are an error, which is an AssertionError, too."""
    assert Old(old=3).new == [3] and Old(kept=2).kept == Old(kept_alias=2).kept == 2
    assert Old(new="auto").new is None
    for error in (AssertionError, ConfigError):
        with pytest.raises(error, match="old is deprecated, and new is set, too"):
            Old(old=3, new=[3])
    for wrong in ({"unknown": 1}, {"new": 1}, {"kept": "text"}):
        with pytest.raises(ValidationError):
            Old(**wrong)


# -- DeepSpeedConfig ---------------------------------------------------------------------------------------------------


class _Path:
    """A path that is no pathlib.Path, as py.path.local is."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


def test_a_config_is_read_from_any_path(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"train_batch_size": 4, "gradient_allreduce_op": "SUM"}))
    for path in (file, str(file), _Path(file)):
        config = DeepSpeedConfig(path)
        assert config.train_batch_size == 4 and config.gradient_allreduce_op == "sum"
        assert Config.load(path).train_batch_size == 4
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=_Path(file))
    engine.destroy()


def test_a_config_has_its_sections() -> None:
    config = DeepSpeedConfig({"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    assert config.zero_config.stage == 2 and config.bfloat16_config.enabled and not config.float16_config.enabled
    assert config.gradient_allreduce_op == "mean"


# -- optimizers, the accelerator and layers ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_lion_updates_as_the_cpus_lion(dtype: torch.dtype) -> None:
    """FusedLion computes the update of DeepSpeedCPULion, up to the rounding of 16-bit parameters."""
    torch.manual_seed(0)
    values = torch.randn(100)
    ours, cpu = (nn.Parameter(values.to(dtype)) for _ in range(2))
    fused, native = FusedLion([ours], weight_decay=0.1), DeepSpeedCPULion([cpu], weight_decay=0.1)
    for _ in range(3):
        ours.grad = torch.randn(100).to(dtype)
        cpu.grad = ours.grad.clone()
        fused.step()
        native.step()
    torch.testing.assert_close(
        ours, cpu, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-2 * (dtype.itemsize == 2)
    )
    fused.zero_grad()
    assert ours.grad is None and set(RULES["lion"].keys) <= fused.param_groups[0].keys()
    with pytest.raises(ConfigError, match="betas"):
        FusedLion([ours], betas=(1.0, 0.9))


def test_fused_lion_trains_in_an_engine(opens: Any) -> None:
    model = nn.Linear(4, 4)
    engine = opens(model=model, given={"optimizer": FusedLion(model.parameters(), lr=1e-2)}, optimizer=None)
    assert engine.optimizer.rule == "lion" and engine.get_lr() == [1e-2]


@pytest.mark.parametrize("kind", ["CPUAdam", "CPUAdagrad", "CPULion", "FusedAdam", "FusedLion"])
def test_builders_of_optimizers_name_the_class(kind: str) -> None:
    """A builder is compatible, and its `load` names an optimizer that exists."""
    builder = getattr(deepspeed.ops.op_builder, f"{kind}Builder")()
    assert builder.is_compatible() and builder.NAME.replace("_", "") == kind.lower()
    with pytest.raises(UsageError, match=r"use deepspeed\.ops\.") as caught:
        builder.load()
    module, _, name = str(caught.value).rpartition("deepspeed.ops.")[2].partition(".")
    assert issubclass(getattr(getattr(deepspeed.ops, module), name), torch.optim.Optimizer)


def test_sub_groups_of_the_cpus_adam_are_refused() -> None:
    optimizer = DeepSpeedCPUAdam([nn.Parameter(torch.zeros(3))])
    for call in (optimizer.step_subgroup, optimizer.rollback_subgroup):
        with pytest.raises(UsageError, match=r"subgroup\(0\) was called.*call step\(\)"):
            call(0)


def test_the_accelerator_constructs_tensors() -> None:
    accelerator = deepspeed.get_accelerator()
    made = accelerator.ByteTensor([1, 255])
    assert made.dtype == torch.uint8 and made.tolist() == [1, 255]
    assert accelerator.on_accelerator(made) and accelerator.HalfTensor([1.5]).dtype == torch.float16


def test_the_cpu_counts_a_device_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator("cpu")
    assert accelerator.device_count() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert accelerator.device_count() == 3
    monkeypatch.setenv("LOCAL_SIZE", "2")  # of DeepSpeed's launcher
    assert accelerator.device_count() == 2


def test_a_tiled_layer_reports_the_bounds_of_its_parts() -> None:
    layer = deepspeed.zero.TiledLinear(7, 5, in_splits=2, out_splits=3)
    assert layer.out_parts == [0, 2, 4, 5] and layer.in_parts == [0, 4, 7]


def test_the_loss_scaler_reports_its_window(opens: Any) -> None:
    engine = opens(fp16={"enabled": True, "loss_scale_window": 7})
    scaler = engine.optimizer.loss_scaler
    assert (scaler.scale_window, scaler.cur_iter) == (7, 0)
    for bad in (False, True, False):
        loss = engine(*token_batches(1)[0])
        engine.backward(loss * float("nan") if bad else loss)
        engine.step()
    assert (scaler.cur_iter, engine.skipped_steps) == (3, 1)
    constant = infinity.engine.optimizer.loss_scale.LossScaler(infinity.engine.optimizer.loss_scale.LossScale(1.0))
    assert constant.scale_window == 0
