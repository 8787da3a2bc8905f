"""An optimizer that the user constructed: its rule, groups and states, which an engine takes over.

client = ClientOptimizer.of(torch.optim.AdamW(model.parameters()), model, "fp32")
engine = TrainingEngine(model, client.configure(config), client.groups)
client.hand_over(engine)  # the engine continues from the optimizer's states
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from infinity.engine.gather import set_full_fp32_param
from infinity.engine.optimizer.state_dict import check_state_dict, hyper_of
from infinity.engine.optimizer.unit_optimizer import HandedOver, ParamGroups
from infinity.engine.training import TrainingEngine
from infinity.errors import ConfigError, UsageError
from infinity.optim.cpu_adam import join_master
from infinity.optim.cpu_optimizer import CPUAdam
from infinity.optim.moments import moment_to_fp32
from infinity.rules import RULES, MomentFormat, RuleName, in_words
from infinity.units.compiled import own_name, uncompiled

if TYPE_CHECKING:
    from infinity.config import Config
    from infinity.config.optimization import Optimizer

MakeOptimizer = Callable[[list[Any]], torch.optim.Optimizer]

_RULES: dict[type[torch.optim.Optimizer], RuleName] = {
    getattr(torch.optim, rule.torch): rule.name for rule in RULES.values() if rule.torch
} | {CPUAdam: "adam"}
"""Class → its rule. An Adam whose groups decouple the weight decay is AdamW."""
_UPDATE = ("step", "_init_group", "_update")
"""Methods of torch's optimizers, and of this package's, that update."""
_CHANGE_RESULTS = ("amsgrad", "maximize", "differentiable")
"""Options of torch's optimizers that the engine's update lacks. Others select an implementation of the same update."""


@dataclass(frozen=True)
class ClientOptimizer:
    """A client's optimizer, read without a copy of its states. `of` constructs it."""

    optimizer: torch.optim.Optimizer
    section: Optimizer
    """The config's optimizer section with its rule and defaults."""
    groups: list[dict[str, Any]]
    """Its param_groups without torch's options, as `model_parameters` of an engine."""
    state_dict: dict[str, Any]
    """Its state dict in torch's layout, with moments in fp32 or 16 bits."""
    masters: dict[nn.Parameter, torch.Tensor]
    """The fp32 values of 16-bit parameters that CPUAdam trains."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: nn.Module, moments: MomentFormat) -> ClientOptimizer:
        """Read `optimizer`, over parameters of `model`. moments: format of the engine's moments.

        Raises ConfigError for a class, an option or a value that an engine lacks, and ModelError for states of other
        shapes. Changes nothing.
        """
        rule, kind = _rule(optimizer), type(optimizer).__name__
        _check_options(optimizer, rule, moments)
        values = hyper_of(rule, optimizer.defaults).by_key()
        dropped = {*RULES[rule].torch_keys, *_CHANGE_RESULTS, "decoupled_weight_decay", "param_names", "fused"}
        groups = [{k: v for k, v in group.items() if k not in dropped} for group in optimizer.param_groups]
        names = {id(p): own_name(n) for n, p in uncompiled(model).named_parameters(remove_duplicate=False)}
        for parameter in (p for group in groups for p in group["params"]):
            if id(parameter) not in names:
                raise ConfigError(
                    f"optimizer ({kind}) has a parameter of shape {list(parameter.shape)} that is not the model's: "
                    "construct it with model.parameters(), or groups of them, of the model passed to initialize()"
                )
        state_dict = optimizer.state_dict()
        masters = _decode(optimizer, rule, state_dict)
        trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        check_state_dict(rule, groups, names, trained, state_dict)
        return cls(optimizer, _section(rule, values), groups, state_dict, masters)

    def configure(self, config: Config) -> Config:
        """Return `config` with this optimizer in place of its own."""
        return config.model_copy(update={"optimizer": self.section})

    def hand_over(self, engine: TrainingEngine) -> None:
        """Load the states into `engine`, which was constructed with `configure` and `groups`. Collective.

        Both optimizers share their param_groups from then on, so that a scheduler on the client's sets the engine's
        rates, and the client's hooks run in each step, with the engine's optimizer as argument. The client's states are
        released, and uses of the client that would have no effect, such as `step`, raise UsageError.
        """
        if self.state_dict["state"]:
            engine.optimizer.load_state_dict(self.state_dict)
        for parameter, master in self.masters.items():
            set_full_fp32_param(parameter, master)
        client = self.optimizer
        engine.optimizer.share_groups(client.param_groups)
        engine.optimizer.share_hooks(client)
        client.state = HandedOver()  # type: ignore[assignment]
        client.register_load_state_dict_pre_hook(_refuse_loading)
        # torch's schedulers warn if the optimizer that they were constructed with was never stepped.
        engine.optimizer.register_step_post_hook(lambda *_: setattr(client, "_opt_called", True))
        self.state_dict.clear()
        self.masters.clear()


def construct_optimizer(
    optimizer: torch.optim.Optimizer | MakeOptimizer | None, model: nn.Module, parameters: ParamGroups | None
) -> torch.optim.Optimizer | None:
    """Return a client's optimizer, from an instance or from a function of the parameters.

    parameters: `model_parameters`; by default all trainable ones. Raises ConfigError for other objects.
    """
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if not callable(optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}: pass a torch optimizer, or a function of the parameters that "
            "returns one"
        )
    trainable: Iterable[Any] = (p for p in model.parameters() if p.requires_grad)
    constructed = optimizer(list(parameters if parameters is not None else trainable))
    if not isinstance(constructed, torch.optim.Optimizer):
        raise ConfigError(f"optimizer(parameters) returned a {type(constructed).__name__}: return a torch optimizer")
    return constructed


def _rule(optimizer: torch.optim.Optimizer) -> RuleName:
    """Return the rule of `optimizer`. Raises ConfigError for a class with another update."""
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):  # torch's schedulers count steps in it
        raise ConfigError(
            f"optimizer.step of this {type(optimizer).__name__} was replaced, and an engine would not call the new "
            "one: use optimizer.register_step_pre_hook() or register_step_post_hook(), or del optimizer.step"
        )
    of_this_package = {
        kind: vars(kind)["update_rule"] for kind in type(optimizer).__mro__ if "update_rule" in vars(kind)
    }
    declared: RuleName | None = None
    for known, rule in (of_this_package | _RULES).items():
        # A subclass may change the constructor, but not the update.
        if isinstance(optimizer, known) and all(_inherits(type(optimizer), known, name) for name in _UPDATE):
            declared = declared or rule
    if declared is None:
        raise ConfigError(
            f"optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}, whose update an engine does not "
            f"have: pass torch.optim.{in_words(rule for rule in RULES.values() if rule.torch)}, or "
            "infinity.optim.CPUAdam, or set optimizer in the config, which also has "
            f"{in_words(rule for rule in RULES.values() if not rule.torch)}"
        )
    if not RULES[declared].is_adam:
        return declared
    decoupled = {
        bool(group.get("decoupled_weight_decay", RULES[declared].decouples)) for group in optimizer.param_groups
    }
    if len(decoupled) > 1:
        raise ConfigError(
            "decoupled_weight_decay differs between param_groups of the optimizer: an engine has one rule for all of "
            "them, so set it in all or in none"
        )
    return next(rule.name for rule in RULES.values() if rule.is_adam and {rule.decouples} == decoupled)


def _inherits(kind: type, known: type, name: str) -> bool:
    """Return True if `kind` has the method `name` of `known`, with no wrappers around it but torch's own."""
    method, theirs = getattr(kind, name, None), getattr(known, name, None)
    while method is not None and hasattr(method, "__wrapped__"):
        if not method.__globals__["__name__"].startswith("torch."):
            return False
        method = method.__wrapped__
    return method is (None if theirs is None else inspect.unwrap(theirs))


def _check_options(optimizer: torch.optim.Optimizer, rule: RuleName, moments: MomentFormat) -> None:
    kind = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        where = f"param_group {number} of the optimizer ({kind})"
        for name in _CHANGE_RESULTS:
            if group.get(name):
                raise ConfigError(f"{where} has {name}=True, which an engine does not support: construct it without")
        for name in RULES[rule].keys:
            values = group[name] if isinstance(group[name], (tuple, list)) else [group[name]]
            if any(isinstance(value, torch.Tensor) for value in values):
                raise ConfigError(f"{where} has a tensor as {name}, which an engine does not read: pass a number")
        hyper_of(rule, group)
    theirs = getattr(optimizer, "moments", moments)
    if theirs != moments:
        argument = getattr(optimizer, "moments_arguments", {}).get(moments, f'moments="{moments}"')
        raise ConfigError(
            f'the optimizer ({kind}) has moments in {theirs} and the engine in {moments}: set infinity.moments to "'
            f'{theirs}" in the config, or construct {kind} with {argument}'
        )


def _section(rule: RuleName, values: dict[str, Any]) -> Optimizer:
    """Return the config's section. `values` are in `Hyper`'s range, which is wider than the config's (eps of 0)."""
    from infinity.config.optimization import SECTIONS  # here, since pydantic takes as long to import as the engine

    default = SECTIONS[rule].model_construct()
    return default.model_copy(update={"params": default.params.model_construct(**values)})


def _decode(
    optimizer: torch.optim.Optimizer, rule: RuleName, state_dict: dict[str, Any]
) -> dict[nn.Parameter, torch.Tensor]:
    """Replace CPUAdam's 8-bit codes in `state_dict` by values, and remove the states that complete 16-bit parameters.
    Return the parameters' fp32 values.
    """
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    masters = {}
    for number, param in zip(numbers, params, strict=True):
        state = dict(state_dict["state"].get(number, {}))
        if not state:
            continue
        for name in RULES[rule].moments:
            if f"{name}_8bit" in state:
                codes, scale = state.pop(f"{name}_8bit"), state.pop(f"{name}_scale")
                state[name] = moment_to_fp32(codes, scale, root=name in RULES[rule].roots)
        remainder, master = state.pop("remainder", None), state.pop("master", None)
        if remainder is not None:
            masters[param] = join_master(param.detach().contiguous(), remainder.contiguous())
        elif master is not None:
            masters[param] = master
        state_dict["state"][number] = state
    return masters


def _refuse_loading(*_: Any) -> NoReturn:
    raise UsageError(
        "load_state_dict() was called on the optimizer passed to infinity.initialize(), whose states the engine has "
        "taken: call it on the optimizer that initialize() returned, or before initialize()"
    )
