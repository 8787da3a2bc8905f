"""Applies an initialisation rule to one module, with random numbers from a seed."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from infinity.construction.init_rules import Rule, reset


def apply_rule(rule: Rule, module: nn.Module, seed: int, others: Collection[str] = ()) -> None:
    """Apply `rule` to `module`, and then its own `reset_parameters` to the parameters that the rule does not set.

    Parameters are NaN before. others: names of parameters that need no values.
    """
    seeded(rule, module, seed)
    held = {name: p for name, p in module._parameters.items() if p is not None}
    left = {name for name, parameter in held.items() if name not in others and not is_set(parameter)}
    if left and rule is not reset:  # the rule keeps the values of the constructor
        with aside(module, held.keys() - left, set(module._buffers)):
            seeded(reset, module, seed)


def seeded(rule: Rule, module: nn.Module, seed: int) -> None:
    """Initialise `module` with the global generators of torch, numpy and Python at `seed`, and restore them."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % (1 << 32))
            random.seed(seed)
            rule(module)
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


@contextmanager
def aside(module: nn.Module, parameters: set[str], buffers: set[str]) -> Iterator[None]:
    """Replace the named parameters and buffers of a module by stand-ins in the block, which take its changes.

    Stand-ins of parameters are uninitialised; those of buffers are clones.
    """
    held = {name: p for name, p in module._parameters.items() if p is not None and name in parameters}
    kept = {name: b for name, b in module._buffers.items() if b is not None and name in buffers}
    for name, parameter in held.items():
        stand_in = torch.empty(parameter.shape, dtype=parameter.dtype)
        module._parameters[name] = nn.Parameter(stand_in, parameter.requires_grad)
    module._buffers.update({name: buffer.clone() for name, buffer in kept.items()})
    try:
        yield
    finally:
        module._parameters.update(held)
        module._buffers.update(kept)


def is_set(parameter: nn.Parameter) -> bool:
    """True if no value is NaN. The sum is only a quick test: infinities may sum to NaN as well."""
    value = parameter.data
    if not value.is_floating_point() or not value.sum(dtype=torch.float32).isnan():
        return True
    return not value.isnan().any()
