"""Sections `optimizer` and `scheduler`: the mathematics of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, cast

from pydantic import BeforeValidator, Field, model_validator

from infinity.config.fields import Beta, Count, CountOrZero, Fraction, Number, Positive, Section, Switch

if TYPE_CHECKING:
    from infinity.rules import Rule


class AdamParams(Section):
    """Constants of Adam, named and defaulted as in torch.optim."""

    lr: Number = 1e-3
    """Learning rate; a scheduler changes it from step to step."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""

    eps: Positive = 1e-8
    """Added to the root of the second moment."""

    weight_decay: Number = 0.0
    """Weight decay: this × parameter is added to the gradient."""


class AdamWParams(AdamParams):
    """Constants of AdamW, named and defaulted as in torch.optim."""

    weight_decay: Number = 0.01
    """Weight decay: the parameter is multiplied by 1 − lr × this."""


class AdagradParams(Section):
    """Constants of Adagrad, named and defaulted as in torch.optim."""

    lr: Number = 1e-2
    """Learning rate; a scheduler changes it from step to step."""

    lr_decay: Number = 0.0
    """The learning rate is divided by 1 + (step − 1) × this."""

    eps: Positive = 1e-10
    """Added to the root of the sum of squares, which starts at 0."""

    weight_decay: Number = 0.0
    """Weight decay: this × parameter is added to the gradient."""


class LionParams(Section):
    """Constants of Lion, with its authors' defaults. Updates are signs, so a tenth of AdamW's lr is usual."""

    lr: Number = 1e-4
    """Learning rate; a scheduler changes it from step to step."""

    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """Weight of the mean of gradients in a step, and decay of that mean."""

    weight_decay: Number = 0.0
    """Weight decay: the parameter is multiplied by 1 − lr × this."""


class SGDParams(Section):
    """Constants of SGD, named and defaulted as in torch.optim."""

    lr: Number = 1e-3
    """Learning rate; a scheduler changes it from step to step."""

    momentum: Number = 0.0
    """Decay of the momentum buffer. The buffer is stored in the format of `infinity.moments`, even if this is 0."""

    dampening: Number = 0.0
    """The gradient is multiplied by 1 − this before it is added to the momentum buffer."""

    weight_decay: Number = 0.0
    """Weight decay: this × parameter is added to the gradient."""

    nesterov: Switch = False
    """Nesterov momentum; requires momentum > 0 and no dampening."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> SGDParams:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError("nesterov is true: set momentum above 0, and leave dampening out")
        return self


class _Optimizer(Section):
    """The optimizer. `zero_optimization.offload_optimizer` sets the tier of its states; `infinity.master` and
    `infinity.moments` set their formats."""

    type: str

    @property
    def rule(self) -> Rule:
        """The name of the update rule in `infinity.optim`."""
        return cast("Rule", self.type.lower())


class AdamW(_Optimizer):
    """Adam with decoupled weight decay."""

    type: Literal["AdamW"] = "AdamW"
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    params: AdamWParams = AdamWParams.model_construct()
    """The optimizer's constants."""


class Adam(_Optimizer):
    """Adam."""

    type: Literal["Adam"] = "Adam"
    """Adam (Kingma & Ba 2015)."""

    params: AdamParams = AdamParams.model_construct()
    """The optimizer's constants."""


class Adagrad(_Optimizer):
    """Adagrad."""

    type: Literal["Adagrad"] = "Adagrad"
    """Adagrad (Duchi, Hazan & Singer 2011)."""

    params: AdagradParams = AdagradParams.model_construct()
    """The optimizer's constants."""


class Lion(_Optimizer):
    """Lion."""

    type: Literal["Lion"] = "Lion"
    """Lion (Chen et al. 2023)."""

    params: LionParams = LionParams.model_construct()
    """The optimizer's constants."""


class SGD(_Optimizer):
    """SGD."""

    type: Literal["SGD"] = "SGD"
    """Stochastic gradient descent with momentum."""

    params: SGDParams = SGDParams.model_construct()
    """The optimizer's constants."""


def _named(value: object) -> object:
    """Normalise the case of `type`, and default it to AdamW, as DeepSpeed does."""
    if not isinstance(value, Mapping):
        return value
    kind = value.get("type", "AdamW")
    known = {name.lower(): name for name in ("AdamW", "Adam", "Adagrad", "Lion", "SGD")}
    return {**value, "type": known.get(kind.lower(), kind) if isinstance(kind, str) else kind}


Optimizer: TypeAlias = Annotated[
    AdamW | Adam | Adagrad | Lion | SGD, Field(discriminator="type"), BeforeValidator(_named)
]


class WarmupParams(Section):
    """Keys of every schedule with a warm-up."""

    warmup_num_steps: CountOrZero = 1000
    """Optimizer steps until the highest learning rate is reached; 0 starts there."""

    warmup_type: Literal["log", "linear"] = "log"
    """Shape of the rise. `log`: log(step + 1) / log(warmup_num_steps), fast at first; `linear`: equal steps."""


class WarmupLRParams(WarmupParams):
    """Constants of WarmupLR."""

    warmup_min_lr: Number = 0.0
    """Learning rate at the first step."""

    warmup_max_lr: Number | None = None
    """Learning rate after the warm-up; by default the optimizer's `lr`."""


class TotalSteps(WarmupParams):
    """Keys of every schedule with an end."""

    total_num_steps: Count
    """Optimizer steps until the lowest learning rate is reached; the rate is constant afterwards."""

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
    """Constants of WarmupCosineLR. Ratios are fractions of the optimizer's learning rate."""

    warmup_min_ratio: Fraction = 0.0
    """Learning rate at the first step, as a fraction of the optimizer's `lr`."""

    cos_min_ratio: Fraction = 0.0001
    """Learning rate at the end, as a fraction of the optimizer's `lr`."""


class WarmupLR(Section):
    """Warm-up, then a constant rate."""

    type: Literal["WarmupLR"]
    """Warm up to the highest learning rate, then keep it."""

    params: WarmupLRParams = WarmupLRParams.model_construct()
    """The schedule's constants."""


class WarmupDecayLR(Section):
    """Warm-up, then linear decay to 0."""

    type: Literal["WarmupDecayLR"]
    """Warm up to the highest learning rate, then decay linearly to 0 at `total_num_steps`."""

    params: WarmupDecayLRParams
    """The schedule's constants."""


class WarmupCosineLR(Section):
    """Warm-up, then cosine decay."""

    type: Literal["WarmupCosineLR"]
    """Warm up to the optimizer's learning rate, then decay along half a cosine until `total_num_steps`."""

    params: WarmupCosineLRParams
    """The schedule's constants."""


class LRRangeTestParams(Section):
    """Constants of LRRangeTest."""

    lr_range_test_min_lr: Number = 1e-3
    """Learning rate at the first step."""

    lr_range_test_step_size: Count = 2000
    """Optimizer steps of one stair."""

    lr_range_test_step_rate: Number = 1.0
    """The rate grows by this × `lr_range_test_min_lr` per stair."""

    lr_range_test_staircase: Switch = False
    """true: the rate changes once per stair; false: at every step."""


class LRRangeTest(Section):
    """A rate that grows until training diverges."""

    type: Literal["LRRangeTest"]
    """Learning rates to find the largest one that trains (Smith 2018)."""

    params: LRRangeTestParams = LRRangeTestParams.model_construct()
    """The schedule's constants."""


class OneCycleParams(Section):
    """Constants of OneCycle."""

    cycle_min_lr: Number
    """Learning rate at both ends of the cycle."""

    cycle_max_lr: Number
    """Learning rate in the middle of the cycle."""

    decay_lr_rate: Number = 0.0
    """After the cycle, the rate is `cycle_min_lr` / (1 + this × steps since the cycle / `decay_step_size`)."""

    cycle_first_step_size: Count = 2000
    """Optimizer steps of the rising half."""

    cycle_second_step_size: CountOrZero | None = None
    """Optimizer steps of the falling half; by default those of the first."""

    cycle_first_stair_count: CountOrZero = 0
    """Stairs of the rising half; 0: the rate changes at every step."""

    cycle_second_stair_count: CountOrZero | None = None
    """Stairs of the falling half; by default those of the first."""

    decay_step_size: CountOrZero = 0
    """Optimizer steps of one interval of the decay after the cycle; 0: no decay."""

    cycle_momentum: Switch = True
    """Set `betas`: the first falls while the rate rises, and rises while it falls; the second is 0.99."""

    cycle_min_mom: Fraction = 0.8
    """Momentum in the middle of the cycle."""

    cycle_max_mom: Fraction = 0.9
    """Momentum at both ends of the cycle."""

    decay_mom_rate: Number = 0.0
    """After the cycle, the momentum is `cycle_max_mom` × (1 + this × steps since the cycle / `decay_step_size`)."""


class OneCycle(Section):
    """One rise and fall of the rate, then decay."""

    type: Literal["OneCycle"]
    """One cycle of the learning rate, then decay (Smith 2018)."""

    params: OneCycleParams
    """The schedule's constants."""


Scheduler: TypeAlias = Annotated[
    WarmupLR | WarmupDecayLR | WarmupCosineLR | LRRangeTest | OneCycle, Field(discriminator="type")
]
