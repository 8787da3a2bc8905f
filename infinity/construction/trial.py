"""Checks that modules are initialised independently, so that each rank may make those of its own shards only."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import nn

from infinity.construction.apply import apply_rule, aside
from infinity.construction.init_rules import Rules


def fingerprint(model: nn.Module, rules: Rules, drawn: Mapping[nn.Parameter, str]) -> bytes:
    """Return a digest of the names in `drawn`, and of values that their rules make in a trial.

    Ranks with equal digests make equal values. The trial initialises the smallest module of each class and rule twice.
    Empty if a rule reads other parameters, sets attributes, or has other values when it is repeated, such as those of a
    generator of its own: the values then depend on the modules that were made before.

    drawn: parameters on the meta device that rules will initialise → their names.
    """
    smallest: dict[object, nn.Module] = {}
    for module in model.modules():
        if any(parameter in drawn for parameter in module.parameters(recurse=False)):
            rule = rules.of(module)
            kind = type(module), getattr(rule, "__func__", rule), id(getattr(rule, "__self__", None))
            smallest[kind] = min(smallest.get(kind, module), module, key=_own_numel)
    digest = hashlib.blake2b("\0".join(drawn.values()).encode())
    for module in smallest.values():
        first, second = (_trial(rules, module) for _ in range(2))
        if not first or first != second:
            return b""
        digest.update(first)
    return digest.digest() if smallest else b""


def _trial(rules: Rules, module: nn.Module) -> bytes:
    """Initialise stand-ins of the parameters and buffers of a module. Return their digest; empty if the rule fails, as
    it does when it reads parameters on the meta device, or sets attributes.
    """
    digest, before = hashlib.blake2b(), dict(vars(module))
    with aside(module, set(module._parameters), set(module._buffers)):
        for parameter in module.parameters(recurse=False):
            parameter.data.fill_(math.nan if parameter.is_floating_point() else 0)
        try:
            apply_rule(rules.of(module), module, 0)
        except Exception:  # noqa: BLE001 - the model's code; the unit that needs it raises
            return b""
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    after = vars(module)
    unchanged = before.keys() == after.keys() and all(after[name] is value for name, value in before.items())
    return digest.digest() if unchanged else b""


def _own_numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))
