"""Optimizers that the user constructed: their rules, groups and states, which an engine takes over.

client = ClientOptimizer.of([torch.optim.AdamW(model.parameters())], model, config)
engine = TrainingEngine(model, client.configure(config), client.groups, rules=client.rules)
client.hand_over(engine)  # the engine continues from the optimizer's states
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from infinity.engine.gather import set_full_fp32_param
from infinity.engine.optimizer.state_dict import check_state_dict, hyper_of
from infinity.engine.optimizer.unit_optimizer import HandedOver, ParamGroups
from infinity.engine.torch_optimizers import configured_optimizers
from infinity.engine.training import TrainingEngine
from infinity.errors import ConfigError, UsageError
from infinity.optim.cpu_adam import join_master
from infinity.optim.cpu_optimizer import CPUAdam
from infinity.optim.moments import moment_to_fp32
from infinity.optim.parameter_rule import ParameterRule
from infinity.rules import RULES, MomentFormat, RuleName
from infinity.units.compiled import own_name, uncompiled

if TYPE_CHECKING:
    from infinity.config import Config
    from infinity.config.optimization import Optimizer

ClientOptimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
MakeOptimizer = Callable[[list[Any]], ClientOptimizers]

_RULES: dict[type[torch.optim.Optimizer], RuleName] = {
    getattr(torch.optim, rule.torch): rule.name for rule in RULES.values() if rule.torch
} | {CPUAdam: "adam"}
"""Class → its rule. An Adam whose groups decouple the weight decay is AdamW."""
_UPDATE = ("step", "_init_group", "_update")
"""Methods of torch's optimizers, and of this package's, that update."""
_CHANGE_RESULTS = ("amsgrad", "maximize", "differentiable")
"""Options of torch's optimizers that native rules lack. Others select an implementation of the same update."""


@dataclass(frozen=True)
class ClientOptimizer:
    """The client's optimizers, read without a copy of their states. `of` constructs it."""

    optimizers: list[torch.optim.Optimizer]
    section: Optimizer
    """The config's optimizer section with the native rule and its defaults."""
    groups: list[dict[str, Any]]
    """Their param_groups, as `model_parameters` of an engine; those of native rules without torch's options."""
    rules: list[ParameterRule | None]
    """The rule in Python of each group; None: a native one."""
    state_dict: dict[str, Any]
    """The state dict of all groups in torch's layout, with moments of native rules in fp32 or 16 bits."""
    masters: dict[nn.Parameter, torch.Tensor]
    """The fp32 values of 16-bit parameters that CPUAdam trains."""

    @classmethod
    def of(cls, optimizers: Sequence[torch.optim.Optimizer], model: nn.Module, config: Config) -> ClientOptimizer:
        """Read `optimizers`, over parameters of `model`.

        Native rules update those of one class that has such a rule; rules in Python update the others. Raises
        ConfigError for an update that cannot be made parameter by parameter, and for an option or a value that an
        engine lacks, and ModelError for states of other shapes. Changes nothing.
        """
        moments = config.infinity.moments
        names = {id(p): own_name(n) for n, p in uncompiled(model).named_parameters(remove_duplicate=False)}
        native: RuleName | None = None
        values: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        rules: list[ParameterRule | None] = []
        state_dict: dict[str, Any] = {"state": {}, "param_groups": []}
        masters: dict[nn.Parameter, torch.Tensor] = {}
        for optimizer in optimizers:
            _check_parameters(optimizer, names, groups)
            own = optimizer.state_dict()
            rule = _native_rule(optimizer)
            if config.infinity.optimizer == "torch" or rule is None or native not in (None, rule):
                rules += [ParameterRule.of(optimizer)] * len(optimizer.param_groups)
                groups += [{k: v for k, v in group.items() if k != "param_names"} for group in optimizer.param_groups]
            else:
                native = rule
                _check_options(optimizer, rule, moments)
                values = values or hyper_of(rule, optimizer.defaults).by_key()
                dropped = {*RULES[rule].torch_keys, *_CHANGE_RESULTS, "decoupled_weight_decay", "param_names", "fused"}
                groups += [{k: v for k, v in group.items() if k not in dropped} for group in optimizer.param_groups]
                rules += [None] * len(optimizer.param_groups)
                masters |= _decode(optimizer, rule, own)
            _append(state_dict, own)
        if native is None and moments != "fp32":
            kind = type(optimizers[0]).__name__
            raise ConfigError(
                f'infinity.moments is "{moments}", which is a format of native rules, and {kind} keeps states of its '
                "own: remove infinity.moments"
            )
        trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        check_state_dict(native or config.optimizer.rule, groups, names, trained, state_dict, rules)
        section = _section(native, values) if native is not None else None
        if any(rules):
            kinds = [each.name if each is not None else RULES[native or "adamw"].type for each in rules]
            rates = [group["lr"] for group in groups if "lr" in group]
            section = mixed(", ".join(dict.fromkeys(kinds)), section, float(rates[0]) if rates else 0.0)
        assert section is not None
        return cls(list(optimizers), section, groups, rules, state_dict, masters)

    @classmethod
    def of_config(
        cls, config: Config, model: nn.Module, parameters: ParamGroups | None = None
    ) -> ClientOptimizer | None:
        """Return the optimizers of torch.optim that a config names; None if a native rule updates all parameters.

        parameters: as of `infinity.initialize`. Raises ConfigError as `of`.
        """
        found = configured_optimizers(config, model, parameters)
        return cls.of(found, model, config) if found else None

    @property
    def name(self) -> str:
        """Names of the classes."""
        return ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in self.optimizers))

    def configure(self, config: Config) -> Config:
        """Return `config` with this optimizer in place of its own."""
        return config.model_copy(update={"optimizer": self.section})

    def hand_over(self, engine: TrainingEngine) -> None:
        """Load the states into `engine`, which was constructed with `configure`, `groups` and `rules`. Collective.

        The optimizers share their param_groups with the engine's from then on, so that a scheduler on the client's sets
        the engine's rates, and the client's hooks run in each step, with the engine's optimizer as argument. The
        client's states are released. Uses of the client that would have no effect, such as `step`, raise UsageError.
        """
        if self.state_dict["state"]:
            engine.optimizer.load_state_dict(self.state_dict)
        for parameter, master in self.masters.items():
            set_full_fp32_param(parameter, master)
        engine.optimizer.share_groups(*(optimizer.param_groups for optimizer in self.optimizers))
        for client in self.optimizers:
            engine.optimizer.share_hooks(client)
            client.state = HandedOver()  # type: ignore[assignment]
            client.register_load_state_dict_pre_hook(_refuse_loading)
            # torch's schedulers warn if the optimizer that they were constructed with was never stepped.
            engine.optimizer.register_step_post_hook(lambda *_, client=client: setattr(client, "_opt_called", True))
        self.state_dict.clear()
        self.masters.clear()


def construct_optimizer(
    optimizer: ClientOptimizers | MakeOptimizer | None, model: nn.Module, parameters: ParamGroups | None
) -> list[torch.optim.Optimizer]:
    """Return a client's optimizers, from instances or from a function of the parameters; none for None.

    parameters: `model_parameters`; by default all trainable ones. Raises ConfigError for other objects.
    """
    if optimizer is None:
        return []
    if (found := _listed(optimizer)) is not None:
        return found
    if not callable(optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}: pass a torch optimizer, a list of them, or a function of the "
            "parameters that returns one"
        )
    trainable: Iterable[Any] = (p for p in model.parameters() if p.requires_grad)
    constructed = optimizer(list(parameters if parameters is not None else trainable))
    if (found := _listed(constructed)) is None:
        raise ConfigError(f"optimizer(parameters) returned a {type(constructed).__name__}: return a torch optimizer")
    return found


def _listed(optimizers: Any) -> list[torch.optim.Optimizer] | None:
    """Return a list of optimizers from one or several; None for other objects."""
    if isinstance(optimizers, torch.optim.Optimizer):
        return [optimizers]
    several = isinstance(optimizers, (list, tuple)) and optimizers
    return list(optimizers) if several and all(isinstance(o, torch.optim.Optimizer) for o in optimizers) else None


def _check_parameters(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], before: Sequence[Mapping[str, Any]]
) -> None:
    """Raise ConfigError for parameters that are not the model's, or that another optimizer has. before: its groups."""
    kind = type(optimizer).__name__
    taken = {id(p) for group in before for p in group["params"]}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in names:
            raise ConfigError(
                f"optimizer ({kind}) has a parameter of shape {list(parameter.shape)} that is not the model's: "
                "construct it with model.parameters(), or groups of them, of the model passed to initialize()"
            )
        if id(parameter) in taken:
            raise ConfigError(f"{names[id(parameter)]} is in two optimizers: leave it out of one ({kind})")


def _append(state_dict: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Append the groups and states of one optimizer, whose parameters are numbered after those of the others."""
    first = sum(len(group["params"]) for group in state_dict["param_groups"])
    numbers = {old: first + n for n, old in enumerate(n for group in own["param_groups"] for n in group["params"])}
    for group in own["param_groups"]:
        state_dict["param_groups"].append({**group, "params": [numbers[number] for number in group["params"]]})
    state_dict["state"] |= {numbers.get(number, number): state for number, state in own["state"].items()}


def _native_rule(optimizer: torch.optim.Optimizer) -> RuleName | None:
    """Return the native rule that gives the update of `optimizer`; None if there is none."""
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
    if declared is None or any(group.get(name) for group in optimizer.param_groups for name in _CHANGE_RESULTS):
        return None
    if not RULES[declared].is_adam:
        return declared
    decoupled = {
        bool(group.get("decoupled_weight_decay", RULES[declared].decouples)) for group in optimizer.param_groups
    }
    if len(decoupled) > 1:
        return None
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


def mixed(kind: str, native: Optimizer | None, lr: float) -> Optimizer:
    """Return the config's section of optimizers with rules in Python. kind: their names. native: the section of those
    with a native rule, if any. lr: rate of the first group.
    """
    from infinity.config.optimization import SECTIONS, MixedOptimizer

    params = native.params if native is not None else SECTIONS["adamw"].model_construct().params
    rule = native.rule if native is not None else "adamw"
    rates = params if native is not None else params.model_copy(update={"lr": lr})
    return MixedOptimizer.model_construct(type=kind, params=rates, native=rule)


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
