"""Sections `bf16`, `fp16`, `torch_autocast` and `data_types`: the dtypes of a step."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from infinity.config.fields import AnyNumber, Count, CountOrZero, DType, Number, Section, Switch, Whole
from infinity.inputs import show


class BF16(Section):
    """Training in bfloat16."""

    enabled: Switch = False
    """Store and compute with bfloat16 parameters. The optimizer updates fp32 values (see `infinity.master`) and stores
    its moments in the format of `infinity.moments`."""

    auto_cast: Switch = False
    """Cast floating-point tensors among the positional arguments of the model to bfloat16, in nested lists, tuples and
    dicts, too."""


class FP16(Section):
    """Training in float16, with a loss scale."""

    enabled: Switch = False
    """Store and compute with float16 parameters, with an fp32 master of each. The loss is scaled, and a step whose
    gradients overflow is skipped. bf16 needs neither; use fp16 on devices without bf16."""

    loss_scale: Number = 0.0
    """Constant factor of the loss; 0: dynamic loss scaling, set by the next keys."""

    initial_scale_power: CountOrZero = Field(default=16, le=126)
    """The dynamic scale starts at 2 to this power."""

    loss_scale_window: Whole = 1000
    """Steps without overflow after which the scale is doubled; at least 1 if the scale is dynamic."""

    hysteresis: Count = 2
    """Overflows before the scale is halved; the count restarts whenever the scale is doubled."""

    consecutive_hysteresis: Switch = False
    """true: the count of `hysteresis` restarts after every step without overflow."""

    min_loss_scale: AnyNumber = 1.0
    """Lower bound of the scale, above 0 if the scale is dynamic; training stops with an error when 20 steps in a row
    overflow at it."""

    auto_cast: Switch = False
    """Cast floating-point tensors among the positional arguments of the model to float16, in nested lists, tuples and
    dicts, too."""

    @model_validator(mode="after")
    def _dynamic_scale_has_bounds(self) -> FP16:
        if self.enabled and self.loss_scale == 0:  # DeepSpeed accepts any value where none is used
            for name, least in (("loss_scale_window", "at least 1"), ("min_loss_scale", "more than 0")):
                value = getattr(self, name)
                if value <= 0:
                    raise ValueError(f"{name} must be {least}, not {show(value)}, since the loss scale is dynamic")
        return self


class TorchAutocast(Section):
    """PyTorch's autocast around the forward pass."""

    enabled: Switch = False
    """Run every forward of the model under `torch.autocast`. The parameters keep their dtype, and their gradients are
    reduced in `communication_data_type`."""

    dtype: DType | None = None
    """Dtype of autocast, `bf16` or `fp16`; required if it is enabled. With `fp16` the loss is scaled as by
    `torch.amp.GradScaler`: from 2^16, halved after every overflow, doubled after 2000 steps without one."""

    @model_validator(mode="after")
    def _has_a_16_bit_dtype(self) -> TorchAutocast:
        if self.enabled and self.dtype in (None, "fp32"):
            found = "has no dtype" if self.dtype is None else 'has dtype "fp32", in which nothing is cast'
            raise ValueError(f'is enabled and {found}: set dtype to "bf16" or "fp16", or enabled to false')
        return self


class DataTypes(Section):
    """Dtypes in which values are stored and accumulated."""

    grad_accum_dtype: DType = "fp32"
    """Dtype in which gradients are accumulated over the micro-batches of a step; unused with one micro-batch. `fp16`
    requires fp16 training, for its loss scale. torch's names (`float16` and so on) are accepted, too."""

    param_dtype: DType | None = None
    """Dtype of the parameters, which must be that of the enabled section `bf16` or `fp16`, else fp32."""

    buffer_dtype: DType | None = None
    """Dtype to which floating-point buffers are cast in bf16 and fp16 training. By default they keep their dtype."""

    keep_in_fp32_modules: Literal["auto"] | tuple[str, ...] = "auto"
    """Buffers that are fp32 in bf16 and fp16 training: those whose full name contains a match of one of these
    patterns, in which `*` stands for any text. `auto`: those that the model names in transformers'
    `_keep_in_fp32_modules_strict`, and in fp16 training in `_keep_in_fp32_modules`, too."""

    @field_validator("keep_in_fp32_modules")
    @classmethod
    def _are_patterns(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for name in () if value == "auto" else value:
            try:
                re.compile(name.replace("*", ".*"))
            except re.error as error:
                raise ValueError(
                    f"{name!r} is no pattern ({error}): give parts of names, with * for any text"
                ) from None
        return value
