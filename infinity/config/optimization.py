"""Sections `optimizer` and `scheduler`: the mathematics of a step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, cast, get_args

from pydantic import BeforeValidator, ConfigDict, Field, SerializeAsAny, create_model, model_validator

from infinity.config.fields import Beta, Count, CountOrZero, Number, Positive, Section, Share, Switch
from infinity.rules import RULES, Constant, Hyper, Rule, RuleName

_TYPES: dict[str, Any] = {
    "number": Number,
    "signed": Number,
    "positive": Positive,
    "switch": Switch,
    "steps": CountOrZero | None,
}
"""Kind of a `Constant` → type of its key."""


class OptimizerParams(Section):
    """Constants of a rule."""

    lr: Number

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> OptimizerParams:
        given = self.model_dump()
        if given.get("nesterov") and (given["momentum"] == 0 or given["dampening"] != 0):
            raise ValueError("nesterov is true: set momentum above 0, and leave dampening out")
        return self


class OptimizerSection(Section):
    """The optimizer. `zero_optimization.offload_optimizer` sets the tier of its states; `infinity.master` and
    `infinity.moments` set their formats."""

    type: str
    params: OptimizerParams

    @property
    def rule(self) -> RuleName:
        """The name of the update rule in `infinity.rules`."""
        return cast("RuleName", self.type.lower())

    def hyper(self) -> Hyper:
        """Return the hyper-parameters of groups without their own."""
        return Hyper(self.rule, **self.params.model_dump())


def _type_of(constant: Constant) -> Any:
    betas: Any = tuple
    return betas[(Beta,) * len(constant.default)] if constant.kind == "betas" else _TYPES[constant.kind]


def _section_of(rule: Rule) -> type[OptimizerSection]:
    """Return the section of a rule, whose keys are in its row of `infinity.rules.RULES`."""
    keys: dict[str, Any] = {
        constant.name: (_type_of(constant), Field(constant.default, description=constant.meaning))
        for constant in rule.constants
    }
    params = create_model(
        f"{rule.type}Params", __base__=OptimizerParams, __doc__=rule.about, __module__=__name__, **keys
    )
    kind = Literal[rule.type]  # type: ignore[name-defined]
    return create_model(
        rule.type,
        __base__=OptimizerSection,
        __doc__=rule.source,
        __module__=__name__,
        type=(kind, Field(rule.type, description=rule.source)),
        params=(params, Field(params.model_construct(), description="The optimizer's constants.")),
    )


SECTIONS: dict[RuleName, type[OptimizerSection]] = {rule.name: _section_of(rule) for rule in RULES.values()}
"""Name of a rule → its section."""


class TorchParams(OptimizerParams):
    """Arguments of the class, by its names. `lr` defaults as there."""

    model_config = ConfigDict(extra="allow")

    lr: Number | None = None  # type: ignore[assignment]
    """Learning rate; by default that of the class."""


class TorchOptimizer(OptimizerSection):
    """An optimizer of torch.optim, which is applied to whole parameters (docs/optimizer.md)."""

    type: Literal["Adadelta", "Adafactor", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop"]
    """Name of the class in torch.optim. Muon updates matrices, and AdamW the other parameters, as in DeepSpeed."""

    params: TorchParams = TorchParams.model_construct()
    """Arguments of the class."""

    @property
    def rule(self) -> RuleName:
        """The native rule of groups that are not of this class."""
        return next(iter(RULES))

    def hyper(self) -> Hyper:
        """Return the hyper-parameters of groups without their own."""
        return Hyper(self.rule)


class MixedOptimizer(OptimizerSection):
    """Optimizers that a script constructed, of which some have rules in Python."""

    native: RuleName

    @property
    def rule(self) -> RuleName:
        """The native rule of the other groups."""
        return self.native


# Pickle finds the classes of a config's sections by their names.
for _section in SECTIONS.values():
    globals().update({model.__name__: model for model in (_section, type(_section.model_construct().params))})


def _named(value: object) -> object:
    """Normalise the case of `type`, and default it to that of the first rule, as DeepSpeed does."""
    if not isinstance(value, Mapping):
        return value
    kind = value.get("type", next(iter(RULES.values())).type)
    if isinstance(kind, str):
        names = [*(rule.type for rule in RULES.values()), *get_args(TorchOptimizer.model_fields["type"].annotation)]
        kind = next((name for name in names if name.lower() == kind.lower()), kind)
    return {**value, "type": kind}


if TYPE_CHECKING:
    Optimizer: TypeAlias = OptimizerSection
else:
    Optimizer = SerializeAsAny[
        Annotated[reduce(or_, SECTIONS.values()) | TorchOptimizer, Field(discriminator="type"), BeforeValidator(_named)]
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

    warmup_min_ratio: Share = 0.0
    """Learning rate at the first step, as a fraction of the optimizer's `lr`."""

    cos_min_ratio: Share = 0.0001
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

    cycle_min_mom: Share = 0.8
    """Momentum in the middle of the cycle."""

    cycle_max_mom: Share = 0.9
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
