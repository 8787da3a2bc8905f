"""The optimizer that the user sees: param_groups that schedulers change, and a `step` that the engine carries out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from infinity.config import Optimizer
from infinity.errors import ConfigError, ModelError
from infinity.optim.cpu_adam import HYPER_KEYS, Hyper
from infinity.units.unit import Unit

ParamGroups = Iterable[nn.Parameter] | Iterable[dict[str, Any]] | Iterable[tuple[str, nn.Parameter]]


_OF_OTHERS = {name for names in HYPER_KEYS.values() for name in names} | {"moments", "master", "amsgrad", "maximize"}
"""Keys of a param_group that somebody expects something of."""


class UnitOptimizer(torch.optim.Optimizer):
    """The update of units. Its states live in their tiers, not in `state`; `engine.save_checkpoint` saves them.

    param_groups: as in torch.optim: what the rule reads (`HYPER_KEYS`) may differ by group.
    """

    def __init__(self, groups: list[dict[str, Any]], hyper: Hyper) -> None:
        self._step: Callable[[], None] | None = None
        self._drop: Callable[[], None] = lambda: None
        self.rule = hyper.rule
        known = HYPER_KEYS[hyper.rule]
        for name in (name for group in groups for name in group if name in _OF_OTHERS and name not in known):
            raise ConfigError(
                f"a param_group has {name!r}, which {hyper.rule} does not read: {', '.join(known)} may differ"
            )
        super().__init__(groups, {name: getattr(hyper, name) for name in known})

    def on_step(self, step: Callable[[], None], drop: Callable[[], None] = lambda: None) -> None:
        """What `step` and `zero_grad` do."""
        self._step, self._drop = step, drop

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update with the gradients collected since the step before, however many micro-batches that are; without any,
        nothing happens. `engine.step()` calls it when the last micro-batch of a step is in.

        closure: called first, with gradients enabled, as in torch.optim; it computes a loss and calls backward, and
            may call zero_grad before that. Its value is returned.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        assert self._step is not None
        self._step()
        return value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a step that is not made. After one there are none left: `step` consumes them.

        UsageError where micro-batches are still to come, and where backward has updated units with the gradients.
        """
        self._drop()

    def hypers(self) -> list[Hyper]:
        """What each param_group asks for now."""
        return [
            Hyper(self.rule, **{name: _plain_number(g[name]) for name in HYPER_KEYS[self.rule]})
            for g in self.param_groups
        ]


def _plain_number(value: Any) -> Any:
    """What a user or a checkpoint may have put into a group, as `Hyper` takes it."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(value) if isinstance(value, list) else value


def param_groups(model: nn.Module, given: ParamGroups | None) -> list[dict[str, Any]]:
    """`model_parameters` as a list of groups, checked: parameters of `model`, each once, at least one trainable."""
    entries: list[Any] = list(given) if given is not None else [p for p in model.parameters() if p.requires_grad]
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
                    "pass "
                    "model.parameters(), or groups of them, of the very model given to initialize()."
                )
            if id(parameter) in seen:
                raise ConfigError(f"model_parameters holds {names[id(parameter)]} twice: put it in one group")
            seen.add(id(parameter))
        group["params"] = [p for p in group["params"] if p.requires_grad]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ModelError(
            "the model has no trainable parameters: set requires_grad on those to be trained, or run it with "
            "infinity.init_inference()"
        )
    return groups


def _plain(parameters: Any) -> list[nn.Parameter]:
    """Parameters without the names that named_parameters() puts beside them."""
    entries: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters or [])
    plain = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    for entry in plain:
        if not isinstance(entry, nn.Parameter):
            raise ConfigError(
                f"model_parameters holds a {type(entry).__name__}: pass parameters, (name, parameter) pairs, or groups "
                '{"params": parameters, "lr": …}, as for a torch optimizer'
            )
    return plain


def unit_optimizer(config: Optimizer, groups: list[dict[str, Any]], units: Sequence[Unit]) -> UnitOptimizer:
    """The optimizer of the config over `groups`, holding the parameters that the model has now (not those it was
    built with, where it was on the meta device).
    """
    hyper = Hyper(config.rule, **config.params.model_dump())
    by_group: list[list[nn.Parameter]] = [[] for _ in groups]
    for unit in units:
        for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
            if unit.layout.trainable and slot.group >= 0:
                by_group[slot.group].append(parameter)
    filled = [{**group, "params": members} for group, members in zip(groups, by_group, strict=True)]
    return UnitOptimizer(filled, hyper)
