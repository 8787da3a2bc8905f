"""Rules in Python: any optimizer class that updates parameters one by one, applied to one whole parameter at a time.

rule = ParameterRule(torch.optim.NAdam(model.parameters(), lr=1e-3))
record = rule.record((4096, 1024), group, has_master=True)       # names, shapes and dtypes of the states
rule.update(parameter, gradient, memory, record, updates, group)  # one step of the class; the states are in `memory`

[Note: rules in Python]
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from infinity.errors import ConfigError, ModelError
from infinity.optim.cpu_adam import split_master, split_master_torch
from infinity.plan.records import Field, Record, States, record_of

Group = Mapping[str, Any]
"""A param_group."""

_HINTS = {"foreach": False, "fused": False, "capturable": False}
"""Keys of torch's groups that select an implementation. The value is the one whose bits do not depend on the number of
parameters."""
_OF_TORCH = {"state", "param_groups", "_opt_called", "_step_count"}
"""Attributes that torch changes in a step."""
_PROBED = 3
"""Updates after which the states of a parameter keep their names and shapes."""
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_FIX = "Train with a class that updates each parameter from its own gradient and state, such as torch.optim.AdamW"


@dataclass(frozen=True, eq=False)
class ParameterHyper:
    """A rule in Python, and the present values of a param_group that it applies to."""

    rule: ParameterRule
    values: Group

    def changed(self, other: Any) -> list[str]:
        """Return the keys whose values differ from those of another time, `other`."""
        return [name for name, value in self.values.items() if not _same(value, other.values.get(name))]


@dataclass(frozen=True)
class _Constant:
    """A state that never changes and is no tensor and no number, such as None."""

    value: Any


@dataclass(frozen=True, eq=False)
class ParameterRule:
    """The update of an optimizer's class. `of` checks that it can be applied to one parameter at a time.

    optimizer: gives the class and the attributes of the instance; its param_groups and states are not used.
    """

    optimizer: torch.optim.Optimizer
    _records: dict[tuple[Any, ...], Record] = field(default_factory=dict, repr=False)

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
        step = inspect.signature(type(optimizer).step)
        required = [
            p.name for p in list(step.parameters.values())[1:] if p.default is p.empty and p.kind < p.VAR_POSITIONAL
        ]
        if required:
            raise rule.refused(f"its step() needs {', '.join(required)}, so it couples parameters")
        for number, group in enumerate(optimizer.param_groups):
            if group.get("differentiable"):
                raise ConfigError(
                    f"param_group {number} of the optimizer ({rule.name}) has differentiable=True, which an engine "
                    "does not support: construct it without"
                )
            shapes = sorted({_tiny(p.dim()) for p in group["params"] if p.requires_grad})
            if shapes:
                rule._check_is_separate(group, shapes)
        return rule

    def refused(self, why: str) -> ConfigError:
        """Return the error that an engine cannot apply this rule."""
        kind = type(self.optimizer)
        return ConfigError(
            f"optimizer is a {kind.__module__}.{kind.__name__}, which an engine cannot apply: {why}. {_FIX}"
        )

    def record(self, shape: tuple[int, ...], group: Group, *, has_master: bool) -> Record:
        """Return the format of the states of an fp32 parameter of `shape`, as steps on a copy without memory show it.

        has_master: the record holds the parameter's fp32 master. Raises ConfigError for states of other types.
        """
        key = shape, has_master, *((name, repr(value)) for name, value in group.items() if name != "params")
        if key not in self._records:
            try:
                after = self._probe(shape, group, "meta")
            except Exception:  # noqa: BLE001 - a step that reads a value, which tensors without memory lack
                after = self._probe(shape, group, "cpu")
            self._records[key] = record_of(shape, after, has_master=has_master)
        return self._records[key]

    def update(
        self, param: torch.Tensor, grad: torch.Tensor, memory: torch.Tensor, record: Record, updates: int, group: Group
    ) -> None:
        """Update an fp32 parameter in place, and its states in `memory`.

        param, grad: of one shape, contiguous, on one device; `grad` is overwritten. memory: uint8 (record.nbytes,),
        there too. updates: number of updates before this one. Raises ValueError if the states have other names, shapes
        or dtypes than after the first updates, since they have no place in `memory` then.
        """
        target = nn.Parameter(param)
        target.grad = grad
        found = self._step([target], group, [self._loaded(record.states(updates), memory)])[0]
        if target.data_ptr() != param.data_ptr():  # assigned to `.data`
            param.copy_(target.detach())
        self._store(found, record.states(updates + 1), memory)

    def in_torch(self, record: Record, updates: int, memory: torch.Tensor) -> dict[str, Any]:
        """Return the states as the optimizer keeps them, with copies of the tensors."""
        states = self._loaded(record.states(updates), memory)
        leaves, tree = tree_flatten(states)
        copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        copied: dict[str, Any] = tree_unflatten(copies, tree)
        return copied

    def check_torch(self, state: Mapping[str, Any], record: Record, name: str) -> int:
        """Return a number of updates after which a parameter has such a state, in torch's layout.

        Raises ModelError, with the parameter's name, if there is none.
        """
        fields, tree = _fields(state)
        for updates, states in enumerate(record.after, start=1):
            if _alike(fields, states.fields) and tree == states.tree:
                return updates
        expected = ", ".join(map(_shown, record.after[-1].fields)) or "no state"
        raise ModelError(
            f"the state of {name} has {', '.join(map(_shown, fields))}, and {self.name} has {expected}: load the state "
            "dict of an optimizer of this class, with the same options, over the same parameters"
        )

    def from_torch(self, state: Mapping[str, Any], record: Record, memory: torch.Tensor) -> int:
        """Store a parameter's state, in torch's layout, into `memory`. Returns `check_torch`."""
        updates = self.check_torch(state, record, "a parameter")
        self._store(dict(state), record.after[updates - 1], memory)
        return updates

    # -- the class -----------------------------------------------------------------------------------------------------

    def _step(
        self, params: Sequence[nn.Parameter], group: Group, states: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Run one step of the class over `params`. Returns their states."""
        kind = type(self.optimizer)
        worker = object.__new__(kind)
        given = {name: value for name, value in vars(self.optimizer).items() if name != "step"}
        own = {**group, **{name: hint for name, hint in _HINTS.items() if name in group}, "params": list(params)}
        before = dict(own)
        hooks = {name: type(value)() for name, value in given.items() if name.startswith("_optimizer_")}
        state: dict[Any, Any] = defaultdict(dict, {p: each for p, each in zip(params, states, strict=True) if each})
        vars(worker).update({**given, **hooks, "state": state, "param_groups": [own]})
        # The profiler's wrapper runs hooks of all optimizers, which have run for the engine's.
        step: Callable[..., Any] = kind.step
        with torch.no_grad():
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(worker)  # type: ignore[attr-defined]
        changed = [name for name, value in own.items() if name not in before or not _same(value, before[name])]
        if changed:
            raise self.refused(
                f"its step() changes {changed[0]!r} of the param_group, which is not a parameter's state"
            )
        attributes = [
            name
            for name, value in vars(worker).items()
            if name not in _OF_TORCH and name not in hooks and not _same(value, given.get(name, self))
        ]
        if attributes:
            raise self.refused(f"its step() changes its attribute {attributes[0]!r}, which is not a parameter's state")
        return [state.get(p, {}) for p in params]

    def _probe(self, shape: tuple[int, ...], group: Group, device: str) -> tuple[States, ...]:
        """Return the states after each of the first updates of a parameter of `shape`."""
        param = nn.Parameter(torch.full(shape, 0.5, device=device))
        state: dict[str, Any] = {}
        found: list[States] = []
        for _ in range(_PROBED):
            param.grad = torch.full(shape, 0.25, device=device)
            state = self._step([param], group, [state])[0]
            fields, tree = _fields(state)
            if (unstored := [each for each in fields if each.dtype.is_complex]) != []:
                raise self.refused(f"its state {unstored[0].name} is complex")
            found.append(States(tuple(fields), tree))
        while len(found) > 1 and _alike(found[-1].fields, found[-2].fields) and found[-1].tree == found[-2].tree:
            found.pop()
        return tuple(found)

    def _check_is_separate(self, group: Group, shapes: Sequence[tuple[int, ...]]) -> None:
        """Raise ConfigError unless a step over several parameters has the bits of steps over each."""
        generator = torch.Generator().manual_seed(0)

        def drawn(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        values = [drawn(shape) for shape in shapes for _ in range(2)]
        together = [nn.Parameter(value.clone()) for value in values]
        apart = [nn.Parameter(value.clone()) for value in values]
        states: list[dict[str, Any]] = [{} for _ in values]
        alone: list[dict[str, Any]] = [{} for _ in values]
        before = torch.get_rng_state()
        try:
            for _ in range(_PROBED):
                for one, other in zip(together, apart, strict=True):
                    one.grad = drawn(tuple(one.shape))
                    other.grad = one.grad.clone()
                states = self._step(together, group, states)
                alone = [self._step([param], group, [state])[0] for param, state in zip(apart, alone, strict=True)]
        except ConfigError:
            raise
        except Exception as error:
            raise self.refused(f"a step over tiny tensors ended in {type(error).__name__}: {error}") from error
        if not torch.equal(before, torch.get_rng_state()):
            raise self.refused("its step() draws random numbers, which depend on the order of parameters")
        if any(not torch.equal(one, other) for one, other in zip(together, apart, strict=True)):
            raise self.refused("a parameter's update depends on the other parameters of the step")

    # -- states --------------------------------------------------------------------------------------------------------

    def _loaded(self, states: States, memory: torch.Tensor) -> dict[str, Any]:
        """Return the optimizer's own dict of a parameter; its tensors are views of `memory`."""
        if states.tree is None:
            return {}
        fields = iter(states.fields)
        tree, constants = states.tree

        def value(constant: _Constant | None) -> Any:
            if constant is not None:
                return constant.value
            each = next(fields)
            there = each.of(memory)
            return there.item() if each.is_number else there

        loaded: dict[str, Any] = tree_unflatten([value(constant) for constant in constants], tree)
        return loaded

    def _store(self, state: dict[str, Any], states: States, memory: torch.Tensor) -> None:
        """Copy what the optimizer has not changed in place to `memory`."""
        fields, tree = _fields(state)
        if not _alike(fields, states.fields) or tree != states.tree:
            had, has = (", ".join(map(_shown, each)) for each in (states.fields, fields))
            raise ValueError(f"its states are {has or 'none'} now, and were {had or 'none'} at the first steps")
        values = [leaf for leaf in tree_flatten(state)[0] if isinstance(leaf, (torch.Tensor, bool, int, float))]
        for each, value in zip(states.fields, values, strict=True):
            place = each.of(memory)
            if not isinstance(value, torch.Tensor):
                place.fill_(value)
            elif value.data_ptr() != place.data_ptr() or not value.is_contiguous():
                place.copy_(value)


def _fields(state: Mapping[str, Any]) -> tuple[list[Field], tuple[Any, tuple[_Constant | None, ...]]]:
    """Return the tensors and numbers of a parameter's state, and where they are in it."""
    paths, tree = tree_flatten_with_path(dict(state))
    fields: list[Field] = []
    constants: list[_Constant | None] = []
    for path, leaf in paths:
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", keystr((key,))))) for key in path)
        if isinstance(leaf, torch.Tensor):
            fields.append(Field(name, leaf.dtype, tuple(leaf.shape)))
            constants.append(None)
        elif type(leaf) in _NUMBERS:
            fields.append(Field(name, _NUMBERS[type(leaf)], (), is_number=True))
            constants.append(None)
        else:
            constants.append(_Constant(leaf))
    return fields, (tree, tuple(constants))


def _alike(some: Iterable[Field], others: Iterable[Field]) -> bool:
    """Return whether states have the same names, dtypes and shapes."""
    return [_signature(each) for each in some] == [_signature(each) for each in others]


def _signature(each: Field) -> tuple[Any, ...]:
    return each.name, each.dtype, each.shape, each.is_number


def _shown(each: Field) -> str:
    return f"{each.name} {'number' if each.is_number else list(each.shape)}"


def _tiny(dims: int) -> tuple[int, ...]:
    """Return a shape of so many dimensions, with few elements."""
    return (3, 4, 2, 2, *(1,) * dims)[:dims]


def _same(value: Any, other: Any) -> bool:
    """Return whether a step left a value as it was."""
    if value is other:
        return True
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(value, other)
    return type(value) is type(other) and bool(value == other)


def round_master(master: torch.Tensor, param: torch.Tensor) -> None:
    """Set a 16-bit parameter to its fp32 master, rounded as the native rules do."""
    if param.dtype == torch.bfloat16:
        split = split_master if master.is_cpu else split_master_torch
        param.copy_(split(master)[0])
    else:
        param.copy_(master)
