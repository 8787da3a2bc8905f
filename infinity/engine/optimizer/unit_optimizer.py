"""The public optimizer: param_groups for schedulers, and a `step` that the engine executes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import nn

from infinity.comm.agreement.announcements import Operation
from infinity.engine.optimizer.loss_scale import LossScale, LossScaleNames
from infinity.engine.optimizer.state_dict import KEYS_OF_TORCH, hyper_of
from infinity.errors import ConfigError, ModelError, UsageError
from infinity.optim.parameter_rule import ParameterHyper, ParameterRule
from infinity.rules import RULES, Hyper
from infinity.units.compiled import eager
from infinity.units.residents import owner_of
from infinity.units.unit import Unit

if TYPE_CHECKING:
    from infinity.engine.optimizer.tier_states import TierStates

ParamGroups = Iterable[nn.Parameter] | Iterable[dict[str, Any]] | Iterable[tuple[str, nn.Parameter]]


_OF_OTHERS = KEYS_OF_TORCH | {"moments", "master", "amsgrad", "maximize"}
"""Keys of a param_group that torch.optim reads."""
_READ = "a state_dict of the optimizer"
"""Name of `state_dict` and `load_state_dict` in an error."""


_ADD_PARAM_GROUP: Callable[[torch.optim.Optimizer, dict[str, Any]], None] = getattr(
    torch.optim.Optimizer.add_param_group, "__wrapped__", torch.optim.Optimizer.add_param_group
)
"""torch's method without its decorator, which would import `torch._dynamo`, 60 MB and a second."""


class _NoStates(dict[Any, Any]):
    """The `state` of an optimizer with states in tiers. Refuses uses that would have an effect in torch."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            "optimizer.state was used, but it is empty: an engine keeps the optimizer's states in their tiers. Use "
            'infinity.get_full_optimizer_state(parameter, "exp_avg") and set_full_optimizer_state() for one parameter, '
            "optimizer.state_dict() and load_state_dict() for all."
        )

    __contains__ = __delitem__ = __getitem__ = __setitem__ = _refuse
    clear = get = pop = popitem = setdefault = update = _refuse


class HandedOver(dict[Any, Any]):
    """The `state` of an optimizer that the script passed to `initialize`. Refuses reads and writes."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "a state of the optimizer passed to infinity.initialize() was used, but the engine has taken its states: "
            "use the optimizer that initialize() returned, such as its state_dict()"
        )

    __contains__ = __delitem__ = __getitem__ = __iter__ = __setitem__ = _refuse
    clear = get = items = keys = pop = popitem = setdefault = update = values = _refuse


class Engine(Protocol):
    """The calls that an optimizer makes to its engine (`infinity.engine.training`)."""

    def apply_gradients(self) -> None: ...
    def drop_unused_gradients(self) -> None: ...
    def settle_between_steps(self, what: str, call: Operation) -> None: ...
    def failing(self) -> AbstractContextManager[None]: ...


class UnitOptimizer(LossScaleNames, torch.optim.Optimizer):
    """The optimizer of an engine. Its states live in tiers: `state` is empty, and `state_dict` reads the tiers.

    param_groups: as in torch.optim. The rule's hyper-parameters (`Rule.keys`) may differ by group. Parameters keep
    their given order. states: those that `state_dict` reads. loss_scale: the engine's.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        hyper: Hyper,
        engine: Engine,
        states: TierStates,
        loss_scale: LossScale,
        rules: Sequence[ParameterRule | None] = (),
    ) -> None:
        self._is_complete = False
        self._loss_scale = loss_scale
        self._engine = engine
        self._states = states
        self._shown: dict[Any, Any] = _NoStates()
        self.rule = hyper.rule
        """Name of the native rule of groups that have none in Python, such as "adamw"."""
        self._rules = list(rules) or [None] * len(groups)
        native = [group for group, rule in zip(groups, self._rules, strict=True) if rule is None]
        known = RULES[hyper.rule].keys
        for name in (name for group in native for name in group if name in _OF_OTHERS and name not in known):
            raise ConfigError(
                f"a param_group has {name!r}, which {hyper.rule} does not use: only {', '.join(known)} may differ by "
                "group"
            )
        filled = [{**hyper.by_key(), **g} if r is None else g for g, r in zip(groups, self._rules, strict=True)]
        # Without defaults, which torch would add to groups of other rules.
        super().__init__(filled, {})
        first = next(filter(None, self._rules), None)
        self.defaults = hyper.by_key() if native or first is None else dict(first.optimizer.defaults)
        """Hyper-parameters of a group without its own; schedulers look for `betas` and `momentum` there."""
        self._shared: tuple[list[dict[str, Any]], ...] = ()
        """The lists of param_groups of the client's optimizers."""
        self._lists = [list(group["params"]) for group in self.param_groups]
        self._is_complete = True

    @property
    def state(self) -> Any:
        """Raises UsageError when used, since states live in tiers: read them with `state_dict`."""
        return self._shown

    @state.setter
    def state(self, states: Any) -> None:
        if self._is_complete:  # else set by `Optimizer.__init__`
            _NoStates()._refuse()

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update with the gradients collected since the last step, of any number of micro-batches. Return the value of
        `closure`, or None. Does nothing without gradients. `engine.step()` calls it after a step's last micro-batch.

        closure: called first, with gradients enabled, as in torch.optim; it computes a loss and calls backward, and
            may call zero_grad before.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        self._engine.apply_gradients()
        return value

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients collected since the last step. No-op after `step`, which consumes them.

        Raises UsageError between the micro-batches of a step, and if backward has updated units with the gradients.
        """
        self._engine.drop_unused_gradients()

    def __getstate__(self) -> dict[str, Any]:
        """Raise UsageError: a copy would hold the values of the whole model without an engine to update it."""
        raise UsageError(
            "an engine's optimizer cannot be copied or pickled: save optimizer.state_dict(), or "
            "engine.save_checkpoint(), which writes parameters and optimizer states unit by unit"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UsageError once the engine is constructed, since all states have been placed by then."""
        if self._is_complete:
            raise UsageError(
                "optimizer.add_param_group() was called on an engine's optimizer, whose parameters are fixed by "
                "initialize(): close the engine with engine.close(restore=True), which returns the values to the "
                "model, and pass all groups as model_parameters to a new infinity.initialize()"
            )
        _ADD_PARAM_GROUP(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict in torch's layout, which torch.optim's optimizer of the same rule loads.

        Moments are fp32 in host memory and unsharded on every rank, even if the engine stores them in 16 or 8 bits.
        Collective; call it between two steps. Raises UsageError between backward and step.

        Needs host memory for the moments of the whole model on every rank, 8 bytes per parameter with Adam.
        `engine.save_checkpoint` writes them unit by unit instead.
        """
        self._engine.settle_between_steps(_READ, Operation.READ_OPTIMIZER)
        states = self._states.read()
        listed = [param for group in self.param_groups for param in group["params"]]
        self._shown = {param: states[param] for param in listed if param in states}
        try:
            packed = super().state_dict()
        finally:
            self._shown = _NoStates()
        extra = [RULES[self.rule].torch_keys if rule is None else {} for rule in self._rules]
        groups = [{**more, **group} for more, group in zip(extra, packed["param_groups"], strict=True)]
        return {**packed, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments, step counts and hyper-parameters from `state_dict()`, or from torch.optim's optimizer of the
        same rule. Parameters are matched by their position in the groups.

        Moments stored in 16 or 8 bits are rounded as in an update. Parameters, schedulers and the engine's step count
        are unchanged. Collective; call it with the same dict on all ranks, between two steps.

        Raises, before any change: ModelError for a dict of other parameters or another rule, ConfigError for amsgrad,
        maximize and values out of range, UsageError between backward and step, RanksError if ranks differ.
        """

        def take(_: torch.optim.Optimizer, saved_dict: dict[str, Any]) -> dict[str, Any]:
            self._engine.settle_between_steps(_READ, Operation.LOAD_OPTIMIZER)
            saved = self._states.load(self.param_groups, saved_dict, self._engine.failing())
            present = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
            numbers = [list(group["params"]) for group in saved_dict["param_groups"]]
            groups = [
                {**old, **new, "params": params} for old, new, params in zip(present, saved, numbers, strict=True)
            ]
            return {"state": {}, "param_groups": groups}  # torch loads the groups and calls the hooks

        shared = self.param_groups
        handle = self.register_load_state_dict_pre_hook(take)  # after the user's hooks, which may change the dict
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._replace_groups(shared)  # torch has assigned new ones

    def share_groups(self, *lists: list[dict[str, Any]]) -> None:
        """Use the param_groups of one or several optimizers with the same groups, updated with the present values, so
        that a scheduler of either changes both.
        """
        groups = lists[0] if len(lists) == 1 else [*chain(*lists)]
        for group, own in zip(groups, self.param_groups, strict=True):
            own.update({**group, **own})
        self._shared = lists
        self._replace_groups(groups)

    def share_hooks(self, other: torch.optim.Optimizer) -> None:
        """Run the hooks of `other`, registered before or after this call, in each step."""

        def before(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for hook in tuple(other._optimizer_step_pre_hooks.values()):
                hook(self, args, kwargs)

        def after(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for hook in tuple(other._optimizer_step_post_hooks.values()):
                hook(self, args, kwargs)

        self.register_step_pre_hook(before)
        self.register_step_post_hook(after)

    def _replace_groups(self, groups: list[dict[str, Any]]) -> None:
        """Use the list and the dicts of `groups`, with the contents of the present ones."""
        present, self.param_groups = self.param_groups, groups
        for group, own in zip(groups, present, strict=True):
            if group is not own:
                group.clear()
                group.update(own)

    def hypers(self) -> list[Hyper | ParameterHyper]:
        """Return the present hyper-parameters of each param_group.

        Raises ConfigError for values out of range. Raises UsageError for changes that torch.optim supports and an
        engine does not: other parameters in the groups, amsgrad, maximize.
        """
        groups = self.param_groups
        shared = [*chain(*self._shared)] if len(self._shared) > 1 else groups
        lists = [group["params"] for group in shared]
        if [*map(len, lists)] != [*map(len, self._lists)] or not all(map(is_, chain(*lists), chain(*self._lists))):
            raise UsageError(
                "the parameters of optimizer.param_groups were changed, but an engine trains those passed to "
                "initialize(), in their groups: undo the change. To leave a parameter out, call requires_grad_(False) "
                "on it; for other groups, save a checkpoint, close the engine, and pass them as model_parameters."
            )
        found: list[Hyper | ParameterHyper] = []
        for group, rule in zip(groups, self._rules, strict=True):
            if rule is not None:
                found.append(ParameterHyper(rule, {k: _present(v) for k, v in group.items() if k != "params"}))
                continue
            for name in ("maximize", "amsgrad"):
                if name in RULES[self.rule].torch_keys and group.get(name):
                    raise UsageError(f"{name} of a param_group was set, which an engine does not support: unset it")
            found.append(hyper_of(self.rule, group))
        return found


def _present(value: Any) -> Any:
    """Return a value of a param_group that later changes leave alone: a scheduler changes a tensor in place."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def refuse_managed(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise UsageError in steps of other optimizers over parameters of an engine, as a hook of all optimizers.

    The `.grad` of such parameters is None, and torch.optim silently skips parameters without a gradient.
    """
    if isinstance(optimizer, UnitOptimizer):
        return
    for parameter in (param for group in optimizer.param_groups for param in group["params"]):
        owner = owner_of(parameter)
        if owner is not None and owner.unit.layout.trainable and parameter.requires_grad:
            if isinstance(optimizer.state, HandedOver):
                raise UsageError(
                    f"step() was called on the {type(optimizer).__name__} passed to infinity.initialize(), whose "
                    "states the engine has taken: call engine.step(), or step() of the optimizer that initialize() "
                    "returned"
                )
            raise UsageError(
                f"a separate {type(optimizer).__name__} was called to update "
                f"{owner.unit.layout.slots[owner.slot].name}, whose gradients an engine collects, so the call would "
                "change nothing. Use the optimizer that infinity.initialize() returns, and pass parameters with other "
                "hyper-parameters as a group of model_parameters."
            )


def param_groups(model: nn.Module, model_parameters: ParamGroups | None) -> list[dict[str, Any]]:
    """Return `model_parameters` as a validated list of groups. None stands for all trainable parameters.

    Frozen parameters and empty groups keep their positions, as in torch. Raises ConfigError for parameters of another
    model or listed twice, and ModelError if none is trainable.
    """
    trainable = (p for p in model.parameters() if p.requires_grad)
    entries: list[Any] = list(model_parameters if model_parameters is not None else trainable)
    if entries and isinstance(entries[0], dict):
        groups = [{**group, "params": _plain(group.get("params"))} for group in entries]
    else:
        groups = [{"params": _plain(entries)}]
    names = {id(p): name for name, p in model.named_parameters()}
    seen: set[int] = set()
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"model_parameters holds a parameter of shape {list(parameter.shape)} that is not the model's: "
                    "pass model.parameters(), or groups of them, of the model passed to initialize()."
                )
            if id(parameter) in seen:
                raise ConfigError(f"model_parameters holds {names[id(parameter)]} twice: put it in one group")
            seen.add(id(parameter))
    if not names:
        raise ModelError("the model has no parameters: call the model directly, without an engine")
    if not any(p.requires_grad for group in groups for p in group["params"]):
        raise ModelError(
            "the model has no trainable parameters: set requires_grad on the parameters to train, or run it with "
            "infinity.init_inference()"
        )
    return groups


def _plain(parameters: Any) -> list[nn.Parameter]:
    """Return a list of parameters from one, several, or (name, parameter) pairs. Raises ConfigError for other types."""
    entries: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters or [])
    plain = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    for entry in plain:
        if not isinstance(entry, nn.Parameter):
            raise ConfigError(
                f"model_parameters holds a {type(entry).__name__}: pass parameters, (name, parameter) pairs, or groups "
                '{"params": parameters, "lr": …}, as for a torch optimizer'
            )
    return plain


def present_groups(
    groups: list[dict[str, Any]], names: Mapping[str, int], units: Sequence[Unit]
) -> list[dict[str, Any]]:
    """Return `groups` with the model's present parameters, in the same order.

    Parameters on the meta device have been replaced since `groups` was made. names: name → id of the original
    parameter in `groups`.
    """
    present = {
        names[slot.name]: parameter
        for unit in units
        for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True)
        if slot.name in names  # inner tensors have names of their own, and their wrapper stays
    }
    return [{**group, "params": [present.get(id(p), p) for p in group["params"]]} for group in groups]
