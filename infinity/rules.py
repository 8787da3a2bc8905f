"""Optimizer rules: one row for each, and the hyper-parameters of a parameter group.

`RULES` is the only place that states a fact about a rule. The config's sections, the optimizers that `initialize`
accepts, torch's state dicts, imports of checkpoints and the states' formats derive from it. A rule's arithmetic is a
struct in `csrc/adam/rules.h`, which repeats its name, its number of moments and the names of its constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import Any, Literal

from infinity.errors import ConfigError

RuleName = Literal["adam", "adamw", "adagrad", "lion", "sgd", "ademamix"]
MomentFormat = Literal["fp32", "bf16", "8bit"]


@dataclass(frozen=True)
class Constant:
    """A hyper-parameter: an attribute of `Hyper`, a key of param_groups and of the config's `optimizer.params`."""

    name: str
    default: Any
    """Default in the config."""
    kind: Literal["number", "signed", "positive", "betas", "switch", "steps"]
    """Values that the config accepts: from 0, also below 0 in param_groups, above 0, as many numbers in [0, 1) as in
    the default, a boolean, or a whole number of steps or None."""
    meaning: str
    deepspeed: Any = None
    """DeepSpeed's default, as in JSON, where it differs."""

    def numbers(self, value: Any) -> dict[str, float]:
        """Return the arguments of the native kernels for a value. Raises ConfigError if it is out of range."""
        if self.kind == "betas":
            count = len(self.default)
            if len(value) != count or not all(_is_number(beta) and 0.0 <= beta < 1.0 for beta in value):
                raise ConfigError(f"{self.name} are {value}: give {('two', 'three')[count - 2]} numbers in [0, 1)")
            return {f"beta{place}": beta for place, beta in enumerate(value, 1)}
        if self.kind == "switch":
            return {self.name: bool(value)}
        if self.kind == "steps" and (value is None or (isinstance(value, int) and value >= 0)):
            return {self.name: value or 0}
        if self.kind == "steps":
            raise ConfigError(f"{self.name} is {value!r}: give a number of steps, or None")
        least = -_LARGEST if self.kind == "signed" else 0.0
        if not _is_number(value) or not least <= value <= _LARGEST:
            given = "a number in fp32's range" if self.kind == "signed" else "a number from 0 to fp32's largest"
            raise ConfigError(f"{self.name} is {value!r}: give {given}")
        return {self.name: value}


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """An optimizer rule. Rows are compared by identity."""

    name: RuleName
    """Name in the native kernels and in checkpoints."""
    type: str
    """Name in the config's `optimizer.type`: `name` with capitals."""
    source: str
    """Who published it, for the documentation."""
    moments: tuple[str, ...]
    """Names of its states, as in torch.optim."""
    roots: tuple[str, ...] = ()
    """Moments that are sums or means of squares. Their 8-bit codes hold the square root."""
    about: str
    """First sentence of the documentation of its constants."""
    constants: tuple[Constant, ...]
    torch: str = ""
    """Name of torch's class in torch.optim; "" if it has none."""
    torch_keys: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of a param_group of torch's class, with the values that an engine has."""
    marks: tuple[str, ...] = ()
    """Keys of param_groups that no other optimizer has."""
    counts_steps: bool = True
    """False: torch's class keeps no step count, and no moment before the second step."""
    has_states_at_first: bool = False
    """True: torch's class creates its states when it is constructed."""
    is_deepspeeds: bool = True
    """True if DeepSpeed has an optimizer of its own for the rule; it constructs torch's for others."""

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Names of its constants, which are the keys of its param_groups, named as in torch.optim."""
        return tuple(constant.name for constant in self.constants)

    @property
    def is_adam(self) -> bool:
        """True for Adam and AdamW, which are one class in torch."""
        return "decoupled_weight_decay" in self.torch_keys

    @property
    def decouples(self) -> bool:
        """True for AdamW. Tells it from Adam."""
        return bool(self.torch_keys.get("decoupled_weight_decay"))


_RATE = "Learning rate; a scheduler changes it from step to step."
_DECOUPLED = "Weight decay: the parameter is multiplied by 1 − lr × this."
_ADDED = "Weight decay: this × parameter is added to the gradient."
_OF_TORCH = {"maximize": False, "foreach": None, "differentiable": False, "fused": None}

_ADAM = (
    Constant("lr", 1e-3, "number", _RATE),
    Constant("betas", (0.9, 0.999), "betas", "Decay of the running means of the gradient and of its square."),
    Constant("eps", 1e-8, "positive", "Added to the root of the second moment."),
)

_ROWS = (
    Rule(
        name="adamw",
        type="AdamW",
        source="Adam with decoupled weight decay (Loshchilov & Hutter 2019).",
        moments=("exp_avg", "exp_avg_sq"),
        roots=("exp_avg_sq",),
        about="Constants of AdamW, named and defaulted as in torch.optim.",
        constants=(*_ADAM, Constant("weight_decay", 0.01, "number", _DECOUPLED, deepspeed=0.0)),
        torch="AdamW",
        torch_keys={**_OF_TORCH, "amsgrad": False, "capturable": False, "decoupled_weight_decay": True},
    ),
    Rule(
        name="adam",
        type="Adam",
        source="Adam (Kingma & Ba 2015).",
        moments=("exp_avg", "exp_avg_sq"),
        roots=("exp_avg_sq",),
        about="Constants of Adam, named and defaulted as in torch.optim.",
        constants=(*_ADAM, Constant("weight_decay", 0.0, "number", _ADDED)),
        torch="Adam",
        torch_keys={**_OF_TORCH, "amsgrad": False, "capturable": False, "decoupled_weight_decay": False},
    ),
    Rule(
        name="adagrad",
        type="Adagrad",
        source="Adagrad (Duchi, Hazan & Singer 2011).",
        moments=("sum",),
        roots=("sum",),
        about="Constants of Adagrad, named and defaulted as in torch.optim.",
        constants=(
            Constant("lr", 1e-2, "number", _RATE),
            Constant("lr_decay", 0.0, "number", "The learning rate is divided by 1 + (step − 1) × this."),
            Constant("eps", 1e-10, "positive", "Added to the root of the sum of squares, which starts at 0."),
            Constant("weight_decay", 0.0, "number", _ADDED),
        ),
        torch="Adagrad",
        torch_keys={**_OF_TORCH, "initial_accumulator_value": 0.0},
        marks=("lr_decay", "initial_accumulator_value"),
        has_states_at_first=True,
    ),
    Rule(
        name="lion",
        type="Lion",
        source="Lion (Chen et al. 2023).",
        moments=("exp_avg",),
        about="Constants of Lion, with its authors' defaults. Updates are signs, so a tenth of AdamW's lr is usual.",
        constants=(
            Constant("lr", 1e-4, "number", _RATE, deepspeed=1e-3),
            Constant(
                "betas",
                (0.9, 0.99),
                "betas",
                "Weight of the mean of gradients in a step, and decay of that mean.",
                deepspeed=[0.9, 0.999],
            ),
            Constant("weight_decay", 0.0, "number", _DECOUPLED),
        ),
    ),
    Rule(
        name="sgd",
        type="SGD",
        source="Stochastic gradient descent with momentum.",
        moments=("momentum_buffer",),
        about="Constants of SGD, named and defaulted as in torch.optim.",
        constants=(
            Constant("lr", 1e-3, "number", _RATE),
            Constant(
                "momentum",
                0.0,
                "number",
                "Decay of the momentum buffer. The buffer is stored in the format of `infinity.moments`, even if this "
                "is 0.",
            ),
            Constant(
                "dampening",
                0.0,
                "signed",
                "The gradient is multiplied by 1 − this before it is added to the momentum buffer.",
            ),
            Constant("weight_decay", 0.0, "number", _ADDED),
            Constant("nesterov", False, "switch", "Nesterov momentum; requires momentum > 0 and no dampening."),
        ),
        torch="SGD",
        torch_keys=_OF_TORCH,
        marks=("dampening",),
        counts_steps=False,
        is_deepspeeds=False,
    ),
    Rule(
        name="ademamix",
        type="AdEMAMix",
        source="AdEMAMix (Pagliardini, Ablin & Grangier 2024).",
        moments=("exp_avg_fast", "exp_avg_slow", "exp_avg_sq"),
        roots=("exp_avg_sq",),
        about="Constants of AdEMAMix, named and defaulted as in bitsandbytes. Its states are named as by its authors.",
        constants=(
            Constant("lr", 1e-3, "number", _RATE),
            Constant(
                "betas",
                (0.9, 0.999, 0.9999),
                "betas",
                "Decay of the fast mean of the gradient, of the mean of its square, and of the slow mean.",
            ),
            Constant("alpha", 5.0, "number", "Weight of the slow mean beside the fast one."),
            Constant("t_alpha", None, "steps", "Steps in which `alpha` grows from 0, linearly; null: none."),
            Constant(
                "t_beta3",
                None,
                "steps",
                "Steps in which the half-life of the slow mean grows from that of the fast one, linearly; null: none.",
            ),
            Constant("eps", 1e-8, "positive", "Added to the root of the second moment."),
            Constant("weight_decay", 0.01, "number", _DECOUPLED),
        ),
        is_deepspeeds=False,
    ),
)

RULES: dict[RuleName, Rule] = {rule.name: rule for rule in _ROWS}
"""Name → rule. The first is the config's default."""


def rule_of_type(kind: str) -> Rule | None:
    """Return the rule with this `optimizer.type`, in any case."""
    return next((rule for rule in _ROWS if rule.name == kind.lower()), None)


def in_words(rules: Iterable[Rule]) -> str:
    """Return the types of `rules`, such as "AdamW, Adam or SGD"."""
    *others, last = [rule.type for rule in rules]
    return f"{', '.join(others)} or {last}" if others else last


_LARGEST = (2 - 2**-23) * 2.0**127
"""The largest fp32."""


@dataclass(frozen=True, init=False)
class Hyper:
    """Hyper-parameters of one parameter group, as attributes named by the rule's `keys`.

    Raises ConfigError for values out of range, and TypeError for keys that the rule lacks.
    """

    rule: RuleName
    values: Mapping[str, Any]
    """Key → value, with the defaults of the rule's row."""

    def __init__(self, rule: RuleName = "adamw", **given: Any) -> None:
        if rule not in RULES:
            raise ConfigError(f"rule is {rule!r}: give one of {', '.join(RULES)}")
        values = {constant.name: given.pop(constant.name, constant.default) for constant in RULES[rule].constants}
        if given:
            raise TypeError(f"{rule} has no {', '.join(given)}: give {', '.join(values)}")
        self.__dict__.update(rule=rule, values=values)
        decay = self.arguments["lr"] * self.arguments["weight_decay"]
        if decay > _LARGEST:
            raise ConfigError(f"lr * weight_decay is {decay}: give less of one")
        if values.get("nesterov") and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ConfigError("nesterov is True: give a momentum, and no dampening")

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Hyper-parameters as keyword arguments of the native kernels."""
        arguments: dict[str, Any] = {"rule": self.rule}
        for constant in RULES[self.rule].constants:
            arguments |= constant.numbers(self.values[constant.name])
        return arguments

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(f"hyper-parameters have no {name}") from None

    def changed(self, other: Any) -> list[str]:
        """Return the keys whose values differ from those of another time, `other`."""
        return [name for name in RULES[self.rule].keys if getattr(self, name) != getattr(other, name)]

    def by_key(self) -> dict[str, Any]:
        """Return key → value, for a param_group of the rule."""
        return dict(self.values)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
