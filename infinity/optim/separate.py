"""Checks that an optimizer's class updates each parameter from its own gradient and state alone.

Steps over tiny tensors show it, since nothing else says what the code of a class does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from infinity.optim.own_states import copied, same, why_not_stored

Step = Callable[[Sequence[nn.Parameter], Mapping[str, Any], Sequence[dict[str, Any]]], list[dict[str, Any]]]
"""(parameters, their param_group, their states) → their states after a step of the class."""
_STEPS = 3


class Coupled(ValueError):
    """The reason why a class cannot be applied to one parameter at a time."""


def check_signature(kind: type[torch.optim.Optimizer]) -> None:
    """Raise Coupled if `step` has arguments without a default."""
    arguments = list(inspect.signature(kind.step).parameters.values())[1:]
    required = [each.name for each in arguments if each.default is each.empty and each.kind < each.VAR_POSITIONAL]
    if required:
        raise Coupled(f"its step() needs {', '.join(required)}, so it couples parameters")


def check_separate(step: Step, group: Mapping[str, Any]) -> None:
    """Raise Coupled unless steps over several parameters have the bits of steps over each, and leave alone what has no
    gradient.

    group: a param_group, whose parameters give the numbers of dimensions.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    shapes = sorted({_tiny(p.dim()) for p in group["params"] if p.requires_grad})
    values = [drawn(shape) for shape in shapes for _ in range(2)]
    together, apart = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    states: list[dict[str, Any]] = [{} for _ in values]
    alone: list[dict[str, Any]] = [{} for _ in values]
    before = torch.get_rng_state()
    try:
        for _ in range(_STEPS if values else 0):
            for one, other in zip(together, apart, strict=True):
                one.grad = drawn(tuple(one.shape))
                other.grad = one.grad.clone()
            states = step(together, group, states)
            for param, state in zip(together, states, strict=True):
                if why := why_not_stored(state, param):
                    raise Coupled(why)
            alone = [step([param], group, [state])[0] for param, state in zip(apart, alone, strict=True)]
    except Coupled:
        raise
    except Exception as error:
        raise Coupled(f"a step over tiny tensors ended in {type(error).__name__}: {error}") from error
    if not torch.equal(before, torch.get_rng_state()):
        raise Coupled("its step() draws random numbers, which depend on the order of parameters")
    if not all(map(torch.equal, together, apart)):
        raise Coupled("a parameter's update depends on the other parameters of the step")
    if values:
        _check_waits_for_gradients(step, together, group, states)


def _check_waits_for_gradients(
    step: Step, params: Sequence[nn.Parameter], group: Mapping[str, Any], states: Sequence[dict[str, Any]]
) -> None:
    """Raise Coupled if a step changes parameters or states without a gradient, which an engine leaves alone."""
    before, kept = [param.detach().clone() for param in params], [copied(state) for state in states]
    for param in params:
        param.grad = None
    try:
        after = step(params, group, states)
    except Coupled:
        raise
    except Exception:  # noqa: BLE001 - a plain loop fails as well
        return
    found, expected = (tree_flatten(list(each))[0] for each in (after, kept))
    unchanged = len(found) == len(expected) and all(map(same, found, expected))
    if not unchanged or not all(map(torch.equal, params, before)):
        raise Coupled("its step() changes parameters, or their states, that have no gradient")


def _tiny(dims: int) -> tuple[int, ...]:
    """Return a shape of so many dimensions, with few elements."""
    return (3, 4, 2, 2, *(1,) * dims)[:dims]
