"""Sections `bf16`, `fp16`, `torch_autocast` and `data_types`: the dtypes of a step."""

from __future__ import annotations

from typing import TypeVar

from pydantic import Field, field_validator, model_validator

from infinity.config.fields import Count, CountOrZero, DType, Number, Positive, Section, Switch


class BF16(Section):
    """Training in bfloat16."""

    enabled: Switch = False
    """Store and compute with bfloat16 parameters. The optimizer updates fp32 values (see `infinity.master`) and stores
    its moments in the format of `infinity.moments`."""

    auto_cast: Switch = False
    """Cast float inputs of the model to bfloat16. true is an error so far."""

    @model_validator(mode="after")
    def _inputs_are_not_cast(self) -> BF16:
        return _refuse_auto_cast(self, "bfloat16")


class FP16(Section):
    """Training in float16, with a loss scale."""

    enabled: Switch = False
    """Store and compute with float16 parameters, with an fp32 master of each. The loss is scaled, and a step whose
    gradients overflow is skipped. bf16 needs neither; use fp16 on devices without bf16."""

    loss_scale: Number = 0.0
    """Constant factor of the loss; 0: dynamic loss scaling, set by the next keys."""

    initial_scale_power: CountOrZero = Field(default=16, le=126)
    """The dynamic scale starts at 2 to this power."""

    loss_scale_window: Count = 1000
    """Steps without overflow after which the scale is doubled."""

    hysteresis: Count = 2
    """Overflows before the scale is halved; the count restarts whenever the scale is doubled."""

    consecutive_hysteresis: Switch = False
    """true: the count of `hysteresis` restarts after every step without overflow."""

    min_loss_scale: Positive = 1.0
    """Lower bound of the scale; training stops with an error when 20 steps in a row overflow at it."""

    auto_cast: Switch = False
    """Cast float inputs of the model to float16. true is an error so far."""

    @model_validator(mode="after")
    def _inputs_are_not_cast(self) -> FP16:
        return _refuse_auto_cast(self, "float16")


class TorchAutocast(Section):
    """PyTorch's autocast around the forward pass."""

    enabled: Switch = False
    """Run the forward pass under `torch.autocast`. true is an error so far."""

    dtype: DType | None = None
    """Dtype of autocast."""

    lower_precision_safe_modules: tuple[str, ...] | None = None
    """Classes of modules whose parameters are communicated in `dtype`."""

    @field_validator("enabled")
    @classmethod
    def _not_here(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "must be false: the engine does not enter autocast yet. Use torch.autocast around the forward pass, or "
                '"bf16": {"enabled": true}, which stores the parameters in bfloat16'
            )
        return value


class DataTypes(Section):
    """Dtypes in which values are accumulated."""

    grad_accum_dtype: DType = "fp32"
    """Dtype in which gradients are accumulated over the micro-batches of a step; unused with one micro-batch. `fp16`
    requires fp16 training, for its loss scale. torch's names (`float16` and so on) are accepted, too."""

    param_dtype: DType | None = None
    """Dtype of the parameters, which must be that of the enabled section `bf16` or `fp16`, else fp32."""

    buffer_dtype: DType | None = None
    """Dtype to which buffers are cast. By default buffers keep their dtype; any other value is an error so far."""

    @field_validator("buffer_dtype")
    @classmethod
    def _buffers_are_not_cast(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("must be null: buffers keep their dtype. Cast them in the model before initialize")
        return value


_Half = TypeVar("_Half", BF16, FP16)


def _refuse_auto_cast(section: _Half, dtype: str) -> _Half:
    if section.enabled and section.auto_cast:
        raise ValueError(f"auto_cast is true, but inputs are not cast yet: cast float inputs to {dtype} in the loop")
    return section
