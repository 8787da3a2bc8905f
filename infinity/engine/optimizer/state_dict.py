"""Layout and validation of torch's optimizer state dicts.

    {"state": {0: {"step": (), "exp_avg": shape, "exp_avg_sq": shape}, …},
     "param_groups": [{"params": [0, …], "lr": …}, …]}

Parameters are numbered through all groups, in the user's order, frozen ones included. Moments are fp32 in the
parameter's global shape. A parameter that was never updated has no entry, as in torch.

Hyper-parameters and schedules as values of JSON, and back.

JSON has no tuples, no numbers of numpy, and only texts as keys. Dicts with other keys, such as the milestones of
torch's MultiStepLR, become {"__items__": [[key, value], …]}.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from infinity.comm.dtensor import is_distributed
from infinity.errors import CheckpointError, ConfigError, ModelError
from infinity.optim.parameter_rule import ParameterRule
from infinity.rules import RULES, Hyper, RuleName

RULE_KEYS = {name for rule in RULES.values() for name in rule.keys}
"""Keys of a param_group that some rule reads."""
KEYS_OF_TORCH = {name for rule in RULES.values() if rule.torch for name in rule.keys}
"""Keys by which an optimizer's param_group differs from those of others. bitsandbytes' Adam has AdEMAMix's, too."""
_UNSUPPORTED = ("amsgrad", "maximize")
_NO_EFFECT = ("foreach", "capturable", "differentiable", "fused", "initial_accumulator_value")
"""Keys of torch's groups that select an implementation, or have an effect only before the first step."""

SavedGroup = dict[str, Any]
"""A validated param_group of a state dict, without `params` and the keys that an engine ignores."""


@dataclass(frozen=True)
class SavedState:
    """State of one parameter. step: number of updates. moments: by name, in the parameter's global shape. own: the
    state of a rule in Python, which has no moments; None: of a native rule.
    """

    step: int
    moments: dict[str, torch.Tensor]
    own: Mapping[str, Any] | None = None


def hyper_of(rule: RuleName, group: Mapping[str, Any]) -> Hyper:
    """Return the hyper-parameters of a param_group. Raises ConfigError for values out of range."""
    return Hyper(rule, **{name: _plain_number(group[name]) for name in RULES[rule].keys})


def _plain_number(value: Any) -> Any:
    """Convert a hyper-parameter from a group (a number, a tensor, or a sequence of them) to plain numbers."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(map(_plain_number, value)) if isinstance(value, (list, tuple)) else value


def check_state_dict(
    rule: RuleName,
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
    trained: Container[int],
    state_dict: Mapping[str, Any],
    rules: Sequence[ParameterRule | None] = (),
) -> tuple[dict[nn.Parameter, SavedState], list[SavedGroup]]:
    """Return the states by parameter and the param_groups of `state_dict`, for an optimizer with `groups`.

    names: id(parameter) → its name. trained: ids of the trained parameters. rules: the rule in Python of each group;
    None: `rule`. Their states are not checked.

    Raises ModelError if `state_dict` belongs to other parameters or another rule, and ConfigError for options that this
    rule lacks and for hyper-parameters out of range.
    """
    if not (isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys()):
        raise ModelError(
            "the dict lacks state or param_groups, so it is no optimizer's state dict: pass optimizer.state_dict()"
        )
    saved_groups = state_dict["param_groups"]
    ours = [len(group["params"]) for group in groups]
    theirs = [len(group["params"]) for group in saved_groups]
    if ours != theirs:
        raise ModelError(
            f"the state dict has {_counts(theirs)} and this optimizer {_counts(ours)}: pass infinity.initialize() the "
            "model_parameters of the other optimizer, in the same groups and order"
        )
    own = [*rules, *(None for _ in groups)][: len(groups)]
    cleaned = [
        _check_group(rule, number, group) if python is None else _check_own_group(python, number, group, present)
        for number, (group, python, present) in enumerate(zip(saved_groups, own, groups, strict=True))
    ]
    of_python = {id(p) for group, python in zip(groups, own, strict=True) if python for p in group["params"]}
    params = [param for group in groups for param in group["params"]]
    _check_names([name for group in saved_groups for name in group.get("param_names", ())], params, names)
    numbers = [number for group in saved_groups for number in group["params"]]
    state = state_dict["state"]
    unknown = sorted(map(str, set(state) - set(numbers)))
    if unknown:
        raise ModelError(f"the state dict has a state {unknown[0]} that is in no group: pass a complete state dict")
    states = {}
    for number, param in zip(numbers, params, strict=True):
        if id(param) in of_python:
            saved = _own_state(state.get(number))
        else:
            saved = _check_state(rule, names[id(param)], number, param, state.get(number))
        if saved is not None and id(param) not in trained:
            if saved.step == 0:
                continue  # torch's Adagrad has states of frozen parameters too
            raise ModelError(
                f"the state dict has a state of parameter {number} ({names[id(param)]}), which this engine does not "
                "train: set requires_grad on it before infinity.initialize(), or remove its state"
            )
        if saved is not None:
            states[param] = saved
    return states, cleaned


def _counts(numbers: Sequence[int]) -> str:
    """Return a text such as "10 parameters in 2 groups (6, 4)"."""
    by_group = f" ({', '.join(map(str, numbers))})" if len(numbers) > 1 else ""
    return f"{sum(numbers)} parameters in {len(numbers)} group{'s' * (len(numbers) != 1)}{by_group}"


def _check_group(rule: RuleName, number: int, group: Mapping[str, Any]) -> SavedGroup:
    where, known = f"group {number} of the state dict", RULES[rule].keys
    for name in _UNSUPPORTED:
        if group.get(name):
            raise ConfigError(f"{where} has {name}={group[name]}, which {rule} does not support: train without it")
    lacks = [name for name in known if name not in group]
    alien = [name for name in group if name in KEYS_OF_TORCH and name not in known]
    decoupled = group.get("decoupled_weight_decay")
    if RULES[rule].is_adam and decoupled is not None and bool(decoupled) != RULES[rule].decouples:
        alien.append(f"decoupled_weight_decay={decoupled}")
    if lacks or alien:
        differs = [f"lacks {', '.join(lacks)}"] * bool(lacks) + [f"has {', '.join(alien)}"] * bool(alien)
        raise ModelError(f"{where} {' and '.join(differs)}: load the state dict of an optimizer of type {rule}")
    hyper_of(rule, group)
    drop = {"params", "param_names", "decoupled_weight_decay", *_UNSUPPORTED, *_NO_EFFECT}
    return {name: value for name, value in group.items() if name not in drop}


def _check_own_group(
    rule: ParameterRule, number: int, group: Mapping[str, Any], present: Mapping[str, Any]
) -> SavedGroup:
    """Return the values of a group of a rule in Python. `differentiable` and hints have no effect."""
    ignored = {"params", "param_names", *_NO_EFFECT}
    differs = sorted({*group, *present} - ignored - (group.keys() & present.keys()))
    if differs:
        raise ModelError(
            f"group {number} of the state dict and of this optimizer differ in {', '.join(differs)}: load the state "
            f"dict of {rule.name}"
        )
    return {name: value for name, value in group.items() if name not in ignored}


def _own_state(state: Any) -> SavedState | None:
    """Return the state of a parameter of a rule in Python; None if it was never updated."""
    if not state:
        return None
    try:
        step = int(float(state.get("step", 0)))
    except (TypeError, ValueError, RuntimeError):
        step = 0  # a state of that name which is no count
    return SavedState(step, {}, state)


def _check_names(saved: Sequence[str], params: Sequence[nn.Parameter], names: Mapping[int, str]) -> None:
    """Raise ModelError for the same names in another order, since matching by position would swap their states."""
    ours = [names[id(param)] for param in params]
    if len(saved) != len(ours) or set(saved) != set(ours):
        return  # a wrapper may rename parameters
    for number, (theirs, own) in enumerate(zip(saved, ours, strict=True)):
        if theirs != own:
            raise ModelError(
                f"parameter {number} is {theirs} in the state dict and {own} in this optimizer: pass "
                "infinity.initialize() model_parameters in the order of the other optimizer"
            )


def _check_state(rule: RuleName, name: str, number: int, param: nn.Parameter, state: Any) -> SavedState | None:
    """Return the validated state of one parameter; None if it was never updated."""
    moments = RULES[rule].moments
    if not state or (all(state.get(moment) is None for moment in moments) and not state.get("step")):
        return None
    where = f"the state of parameter {number} ({name})"
    lacks = [key for key in moments if state.get(key) is None]
    alien = [key for key in state if key not in ("step", *moments)]
    if lacks or alien:
        differs = [f"lacks {', '.join(lacks)}"] * bool(lacks) + [f"has {', '.join(map(str, alien))}"] * bool(alien)
        raise ModelError(
            f"{where} {' and '.join(differs)}: load the state dict of an optimizer of type {rule}, whose states are "
            f"step, {', '.join(moments)}"
        )
    for key in moments:
        _check_moment(f"{key} of {name}", state[key], param)
    return SavedState(_check_step(rule, where, state.get("step")), {key: state[key] for key in moments})


def _check_moment(what: str, value: Any, param: nn.Parameter) -> None:
    if not isinstance(value, torch.Tensor) or is_distributed(value):
        raise ModelError(f"{what} is a {type(value).__name__}: pass an unsharded tensor (DTensor.full_tensor())")
    if not value.is_floating_point() or value.layout is not torch.strided or value.is_meta:
        raise ModelError(
            f"{what} is {value.dtype}, {value.layout}, on {value.device}: pass dense floating-point values"
        )
    if value.shape != param.shape:
        raise ModelError(
            f"{what} has shape {list(value.shape)} in the state dict, the parameter has {list(param.shape)}: load the "
            "state dict of the same parameters in the same order"
        )


def _check_step(rule: RuleName, where: str, value: Any) -> int:
    if value is None and not RULES[rule].counts_steps:
        return 1  # with a momentum_buffer, the next step is not the first
    try:
        step = float(value)
    except (TypeError, ValueError, RuntimeError):
        step = -1.0
    if not (step >= 0 and step.is_integer()):
        raise ModelError(f"{where} has step {value!r}: pass a whole number of updates, 0 or more")
    return int(step)


def digest(states: Iterable[SavedState], groups: Sequence[SavedGroup]) -> int:
    """Return a 32-bit checksum of states and hyper-parameters, which ranks compare before they load them."""
    hypers = [sorted((k, _plain_number(v)) for k, v in group.items() if k in RULE_KEYS) for group in groups]
    crc = zlib.crc32(repr(hypers).encode())
    for state in states:
        crc = zlib.crc32(str(state.step).encode(), crc)
        own = tree_leaves(state.own) if state.own is not None else []
        crc = zlib.crc32(repr([each for each in own if not isinstance(each, torch.Tensor)]).encode(), crc)
        for moment in (*state.moments.values(), *(each for each in own if isinstance(each, torch.Tensor))):
            values: Any = moment.detach().cpu().float().reshape(-1).numpy()
            crc = zlib.crc32(values, crc)
    return crc


_ITEMS = "__items__"


def to_plain(value: Any, name: str) -> Any:
    """Return a copy of `value` that JSON preserves. name: for messages.

    Raises CheckpointError if it holds something else than numbers, texts, None, and lists, tuples and dicts of them.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return to_plain(value.item(), name)
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_plain(each, f"{name}.{key}") for key, each in value.items()}
        keys = [to_plain(key, f"a key of {name}") for key in value]
        if not any(isinstance(key, (list, dict)) for key in keys):
            values = [to_plain(each, f"{name}[{key!r}]") for key, each in value.items()]
            return {_ITEMS: [list(pair) for pair in zip(keys, values, strict=True)]}
    if isinstance(value, (list, tuple)):
        return [to_plain(each, f"{name}[{number}]") for number, each in enumerate(value)]
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which cannot be saved: use only numbers, texts, and lists, tuples and "
        "dicts of them"
    )


def from_plain(saved: Any, present: Any) -> Any:
    """Return the value of `to_plain`. present: the value that it replaces, whose tuples and Counters it has."""
    if isinstance(saved, dict):
        by_key = present if isinstance(present, Mapping) else {}
        found = {key: from_plain(value, by_key.get(key)) for key, value in _items(saved)}
        return Counter(found) if isinstance(present, Counter) else found
    if isinstance(saved, list):
        known = present if isinstance(present, (list, tuple)) and len(present) == len(saved) else repeat(None)
        values = [from_plain(value, each) for value, each in zip(saved, known, strict=False)]
        return tuple(values) if isinstance(present, tuple) else values
    return saved


def _items(saved: dict[str, Any]) -> Iterable[tuple[Any, Any]]:
    """Return keys and values of a dict of `to_plain`; those of `saved` itself if it was altered to be none."""
    pairs = saved.get(_ITEMS)
    if len(saved) == 1 and isinstance(pairs, list) and all(map(_is_pair, pairs)):
        return [(key, value) for key, value in pairs]
    return saved.items()


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and not isinstance(value[0], (list, dict))
