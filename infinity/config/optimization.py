"""Sections `optimizer` and `scheduler`: the mathematics of a step."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from infinity.config.fields import Beta, Count, CountOrZero, Fraction, Number, Positive, Section


def _optimizer_name(value: object) -> object:
    names = {"adam": "Adam", "adamw": "AdamW"}  # as in other engines, case does not matter
    return names.get(value.lower(), value) if isinstance(value, str) else value


class OptimizerParams(Section):
    """The constants of Adam and AdamW, named and defaulted as in torch.optim."""

    lr: Number = 1e-3
    """Learning rate; a scheduler changes it from step to step."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""

    eps: Positive = 1e-8
    """Added to the root of the second moment."""

    weight_decay: Number = 0.01
    """Weight decay of every parameter; 0 for Adam unless given. AdamW multiplies the parameter by 1 − lr × this; Adam
    adds this × parameter to the gradient."""


class Optimizer(Section):
    """Which optimizer; its states are fp32 and live where `zero_optimization.offload_optimizer` says."""

    type: Annotated[Literal["Adam", "AdamW"], BeforeValidator(_optimizer_name)] = "AdamW"
    """AdamW decouples weight decay from the gradient; Adam adds it to the gradient, as torch.optim.Adam does."""

    params: OptimizerParams = Field(default=OptimizerParams(), validate_default=True)
    """The optimizer's constants."""

    @field_validator("params")
    @classmethod
    def _adam_decays_on_request(cls, params: OptimizerParams, info: ValidationInfo) -> OptimizerParams:
        if info.data.get("type") == "Adam" and "weight_decay" not in params.model_fields_set:
            return params.model_copy(update={"weight_decay": 0.0})
        return params


class WarmupParams(Section):
    """What every schedule that warms up has."""

    warmup_num_steps: CountOrZero = 1000
    """Optimizer steps until the highest learning rate is reached; 0 starts there."""

    warmup_type: Literal["log", "linear"] = "log"
    """How the rate rises: `log` as log(step + 1) / log(warmup_num_steps), fast at first; `linear` in equal steps."""


class WarmupLRParams(WarmupParams):
    """Constants of WarmupLR."""

    warmup_min_lr: Number = 0.0
    """Learning rate at the first step."""

    warmup_max_lr: Number | None = None
    """Learning rate after the warm-up; without it, that of the optimizer."""


class TotalSteps(WarmupParams):
    """What every schedule that ends has."""

    total_num_steps: Count
    """Optimizer steps until the lowest learning rate is reached; it stays there."""

    @model_validator(mode="after")
    def _warmup_ends_first(self) -> TotalSteps:
        if self.warmup_num_steps > self.total_num_steps:
            raise ValueError(
                f"warmup_num_steps ({self.warmup_num_steps}) is more than total_num_steps ({self.total_num_steps}); "
                "the warm-up must end first"
            )
        return self


class WarmupDecayLRParams(WarmupLRParams, TotalSteps):
    """Constants of WarmupDecayLR."""


class WarmupCosineLRParams(TotalSteps):
    """Constants of WarmupCosineLR; ratios are parts of the optimizer's learning rate."""

    warmup_min_ratio: Fraction = 0.0
    """Learning rate at the first step."""

    cos_min_ratio: Fraction = 0.0001
    """Learning rate at the end."""


class WarmupLR(Section):
    """Rise, then stay."""

    type: Literal["WarmupLR"]
    """Rise to the highest learning rate, then stay there."""

    params: WarmupLRParams = WarmupLRParams()
    """The schedule's constants."""


class WarmupDecayLR(Section):
    """Rise, then fall linearly to 0."""

    type: Literal["WarmupDecayLR"]
    """Rise to the highest learning rate, then fall linearly to 0 at `total_num_steps`."""

    params: WarmupDecayLRParams
    """The schedule's constants."""


class WarmupCosineLR(Section):
    """Rise, then fall along half a cosine."""

    type: Literal["WarmupCosineLR"]
    """Rise to the optimizer's learning rate, then fall along half a cosine until `total_num_steps`."""

    params: WarmupCosineLRParams
    """The schedule's constants."""


Scheduler: TypeAlias = Annotated[WarmupLR | WarmupDecayLR | WarmupCosineLR, Field(discriminator="type")]
