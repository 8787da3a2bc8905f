"""Rules in Python: any optimizer class that updates parameters one by one, applied to one whole parameter at a time.

rule = ParameterRule(torch.optim.NAdam(model.parameters(), lr=1e-3))
record = rule.record((4096, 1024), group, has_master=True)       # names, shapes and dtypes of the states
rule.update(parameter, gradient, memory, record, updates, group)  # one step of the class; the states are in `memory`

[Note: rules in Python]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError, ModelError
from infinity.optim.cpu_adam import split_master, split_master_torch
from infinity.optim.live_bytes import Allocations
from infinity.optim.own_states import alike, copied, describe, load, same, shown, snapshot, store, why_not_stored
from infinity.optim.separate import Coupled, check_attributes, check_separate, check_signature
from infinity.plan.records import Record, States, record_of

Group = Mapping[str, Any]
"""A param_group."""

_HINTS = {"foreach": False, "fused": False, "capturable": False}
"""Keys of torch's groups that select an implementation. The value is the one whose bits do not depend on the number of
parameters."""
_OF_TORCH = {"state", "param_groups", "_opt_called", "_step_count"}
"""Attributes that torch changes in a step."""
_PROBED = 3
"""Updates after which the states of a parameter keep their names and shapes."""
_UNCOUNTED = 4
"""Tensors of a parameter's size that an update is taken to make if they cannot be counted."""
_FIX = "Train with a class that updates each parameter from its own gradient and state, such as torch.optim.AdamW"


@dataclass(frozen=True, eq=False)
class ParameterHyper:
    """A rule in Python, and the present values of a param_group that it applies to."""

    rule: ParameterRule
    values: Group

    def changed(self, other: Any) -> list[str]:
        """Return the keys whose values differ from those of another time, `other`."""
        return [name for name, value in self.values.items() if not same(value, other.values.get(name))]


@dataclass(frozen=True, eq=False)
class ParameterRule:
    """The update of an optimizer's class. `of` checks that it can be applied to one parameter at a time.

    optimizer: gives the class and the attributes of the instance; its param_groups and states are not used.
    """

    optimizer: torch.optim.Optimizer
    _records: dict[tuple[Any, ...], Record] = field(default_factory=dict, repr=False)
    _attributes: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    """Name of a parameter → attributes that a script has set on it."""

    @property
    def name(self) -> str:
        """Name of the class."""
        return type(self.optimizer).__name__

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> ParameterRule:
        """Return the rule of `optimizer`.

        Raises ConfigError if its step needs a closure, draws random numbers, keeps state outside of its parameters'
        states, or gives a parameter another value in the presence of other parameters. Steps on tiny tensors show it.
        """
        rule = cls(optimizer)
        try:
            check_signature(type(optimizer))
            for number, group in enumerate(optimizer.param_groups):
                if group.get("differentiable"):
                    raise ConfigError(
                        f"param_group {number} of the optimizer ({rule.name}) has differentiable=True, which an engine "
                        "does not support: construct it without"
                    )
            check_attributes(optimizer)
            check_separate(rule.step, optimizer.param_groups)
        except Coupled as error:
            raise rule.refused(str(error)) from error
        return rule

    def refused(self, why: str) -> ConfigError:
        """Return the error that an engine cannot apply this rule."""
        kind = type(self.optimizer)
        return ConfigError(
            f"optimizer is a {kind.__module__}.{kind.__name__}, which an engine cannot apply: {why}. {_FIX}"
        )

    def record(
        self,
        shape: tuple[int, ...],
        group: Group,
        *,
        has_master: bool,
        name: str = "",
        attributes: Mapping[str, Any] | None = None,
    ) -> Record:
        """Return the format of the states of an fp32 parameter of `shape`, as steps on a copy without memory show it.

        has_master: the record holds the parameter's fp32 master. name, attributes: of the parameter, such as
        `use_muon`; its updates have them, too. Raises ConfigError for states of other types.
        """
        own = dict(attributes or {})
        if own:
            self._attributes[name] = own
        values = ((key, repr(value)) for key, value in (*group.items(), *own.items()) if key != "params")
        key = shape, has_master, *values
        if key not in self._records:
            try:
                after, step_nbytes = self._probed(shape, group, own)
            except Coupled as error:
                raise self.refused(str(error)) from error
            except Exception as error:
                text = f"a step over a tensor of shape {list(shape)} ended in {type(error).__name__}: {error}"
                raise self.refused(text) from error
            self._records[key] = record_of(shape, after, has_master=has_master, step_nbytes=step_nbytes)
        return self._records[key]

    def update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        memory: torch.Tensor,
        record: Record,
        updates: int,
        group: Group,
        name: str = "",
    ) -> None:
        """Update an fp32 parameter in place, and its states in `memory`.

        param, grad: of one shape, contiguous, on one device; `grad` is overwritten. memory: uint8 (record.nbytes,),
        there too. updates: number of updates before this one. name: as of `record`. Raises ValueError if the states
        have other names, shapes or dtypes than after the first updates, since they have no place in `memory` then.
        """
        target = nn.Parameter(param)
        vars(target).update(self._attributes.get(name, {}))
        target.grad = grad
        found = self.step([([target], group)], [load(record.states(updates), memory)])[0]
        # The class may have assigned to `.data`, and kept the old values, or given a state's memory to the parameter.
        assigned = None if target.data_ptr() == param.data_ptr() else target.detach().clone()
        store(found, record.states(updates + 1), memory)
        if assigned is not None:
            param.copy_(assigned)

    def in_torch(self, record: Record, updates: int, memory: torch.Tensor) -> dict[str, Any]:
        """Return the states as the optimizer keeps them, with copies of the tensors."""
        return copied(load(record.states(updates), memory))

    def check_torch(self, state: Mapping[str, Any], record: Record, name: str) -> int:
        """Return a number of updates after which a parameter has such a state, in torch's layout.

        Raises ModelError, with the parameter's name, if there is none.
        """
        found = describe(state)
        for updates, states in enumerate(record.after, start=1):
            if alike(found, states):
                return updates
        raise ModelError(
            f"the state of {name} has {shown(found.fields)}, and {self.name} has {shown(record.after[-1].fields)}: "
            "load the state dict of an optimizer of this class, with the same options, over the same parameters"
        )

    def from_torch(self, state: Mapping[str, Any], record: Record, memory: torch.Tensor, step: int) -> int:
        """Store a parameter's state, in torch's layout, into `memory`. Returns a number of updates after which it has
        such a state: `step`, its count of updates, if that is one.
        """
        updates = self.check_torch(state, record, "a parameter")
        store(state, record.after[updates - 1], memory)
        return step if step > 0 and record.states(step) == record.after[updates - 1] else updates

    # -- the class -----------------------------------------------------------------------------------------------------

    def step(
        self, groups: Sequence[tuple[Sequence[nn.Parameter], Group]], states: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Run one step of the class over the parameters of `groups`, which have gradients and `states`, in their order.
        Returns their states.

        groups: parameters, and the other values of their param_group. Raises Coupled if the step changes something
        else.
        """
        kind = type(self.optimizer)
        worker = object.__new__(kind)
        params = [param for members, _ in groups for param in members]
        given = {name: value for name, value in vars(self.optimizer).items() if name not in ("step", *_OF_TORCH)}
        hooks = {name: type(value)() for name, value in given.items() if name.startswith("_optimizer_")}
        attributes = {name: snapshot(value) for name, value in given.items() if name not in hooks}
        own = [{**group, **{key: hint for key, hint in _HINTS.items() if key in group}} for _, group in groups]
        before = [{key: snapshot(value) for key, value in group.items() if key != "params"} for group in own]
        state: dict[Any, Any] = defaultdict(dict, {p: each for p, each in zip(params, states, strict=True) if each})
        for group, (members, _) in zip(own, groups, strict=True):
            group["params"] = list(members)
        vars(worker).update({**given, **hooks, "state": state, "param_groups": own})
        # The profiler's wrapper runs hooks of all optimizers, which have run for the engine's.
        step: Callable[..., Any] = kind.step
        with torch.no_grad():
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(worker)  # type: ignore[attr-defined]
        for group, kept in zip(own, before, strict=True):
            changed = [key for key, value in group.items() if key != "params" and not same(value, kept.get(key, self))]
            if changed:
                raise Coupled(f"its step() changes {changed[0]!r} of the param_group, which is not a parameter's state")
        after = {name: value for name, value in vars(worker).items() if name not in hooks and name not in _OF_TORCH}
        if changed := [name for name, value in after.items() if not same(value, attributes.get(name, self))]:
            raise Coupled(f"its step() changes its attribute {changed[0]!r}, which is not a parameter's state")
        if others := [key for key in state if not any(key is param for param in params)]:
            raise Coupled(f"its step() keeps a state of {others[0]!r:.40}, which is no parameter")
        return [state.get(p, {}) for p in params]

    def _probed(
        self, shape: tuple[int, ...], group: Group, attributes: Mapping[str, Any]
    ) -> tuple[tuple[States, ...], int]:
        """Return the states after each of the first updates of a parameter of `shape`, and the most bytes of the
        tensors that an update makes.
        """
        try:
            param = nn.Parameter(torch.empty(shape, device="meta"))
            after = self._probe(param, group, attributes)
        except Coupled:
            raise
        except Exception:  # noqa: BLE001 - a step that reads a value, which tensors without memory lack
            param = nn.Parameter(torch.full(shape, 0.5))
            after = self._probe(param, group, attributes)
        try:
            return after, self._counted(param, group)
        except Exception:  # noqa: BLE001 - what a mode does not see, such as a graph compiled as a whole
            return after, _UNCOUNTED * param.nbytes

    def _probe(self, param: nn.Parameter, group: Group, attributes: Mapping[str, Any]) -> tuple[States, ...]:
        vars(param).update(attributes)
        state: dict[str, Any] = {}
        found: list[States] = []
        for _ in range(_PROBED):
            param.grad = torch.full_like(param, 0.25)
            state = self.step([([param], group)], [state])[0]
            if why := why_not_stored(state, param):
                raise Coupled(why)
            found.append(describe(state, is_meta=param.is_meta))
        while len(found) > 1 and alike(found[-1], found[-2]):
            found.pop()
        return tuple(found)

    def _counted(self, param: nn.Parameter, group: Group) -> int:
        """Return the most bytes of the tensors that one of the first updates makes."""
        state: dict[str, Any] = {}
        nbytes = 0
        for _ in range(_PROBED):
            param.grad = torch.full_like(param, 0.25)
            # A mode of its own, since states of an earlier step are in the record, where an update finds them.
            # Dynamo would remember that it skips a function under a mode.
            with _uncompiled(), Allocations() as made:
                state = self.step([([param], group)], [state])[0]
            nbytes = max(nbytes, made.bytes.peak)
        return nbytes


def _uncompiled() -> AbstractContextManager[Any]:
    """Return a block in which functions of `torch.compile` run as they are."""
    # Importing Dynamo takes longer than the engine; a class that compiles has imported it.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def round_master(master: torch.Tensor, param: torch.Tensor) -> None:
    """Set a 16-bit parameter to its fp32 master, rounded as the native rules do."""
    if param.dtype == torch.bfloat16:
        split = split_master if master.is_cpu else split_master_torch
        param.copy_(split(master)[0])
    else:
        param.copy_(master)
