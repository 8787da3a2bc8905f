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

Groups = Sequence[tuple[Sequence[nn.Parameter], Mapping[str, Any]]]
"""Parameters, and the other values of their param_group."""
Step = Callable[[Groups, Sequence[dict[str, Any]]], list[dict[str, Any]]]
"""(groups, states of all parameters) → states after a step of the class."""
_STEPS = 3


class Coupled(ValueError):
    """The reason why a class cannot be applied to one parameter at a time."""


def check_signature(kind: type[torch.optim.Optimizer]) -> None:
    """Raise Coupled if `step` has arguments without a default."""
    arguments = list(inspect.signature(kind.step).parameters.values())[1:]
    required = [each.name for each in arguments if each.default is each.empty and each.kind < each.VAR_POSITIONAL]
    if required:
        raise Coupled(f"its step() needs {', '.join(required)}, so it couples parameters")


def check_attributes(optimizer: torch.optim.Optimizer) -> None:
    """Raise Coupled if an attribute holds parameters, which are others than those that the class steps over here."""
    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups") and not name.startswith("_optimizer_") and _holds_parameters(value):
            raise Coupled(f"its attribute {name!r} holds parameters, and an engine steps over one at a time")


def _holds_parameters(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_parameters, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_holds_parameters, value))
    return isinstance(value, nn.Parameter)


def check_separate(step: Step, param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise Coupled unless steps over several parameters have the bits of steps over each, and leave alone what has no
    gradient.

    param_groups: their parameters give the numbers of dimensions.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    shapes = [sorted({_tiny(p.dim()) for p in group["params"] if p.requires_grad}) for group in param_groups]
    values = [[drawn(shape) for shape in each for _ in range(2)] for each in shapes]
    together, apart = ([[nn.Parameter(value.clone()) for value in each] for each in values] for _ in range(2))
    groups = [(members, group) for members, group in zip(together, param_groups, strict=True)]
    single = [(param, group) for members, group in zip(apart, param_groups, strict=True) for param in members]
    several = [param for members in together for param in members]
    states: list[dict[str, Any]] = [{} for _ in several]
    alone: list[dict[str, Any]] = [{} for _ in several]
    before = torch.get_rng_state()
    try:
        for _ in range(_STEPS if several else 0):
            for one, (other, _) in zip(several, single, strict=True):
                one.grad = drawn(tuple(one.shape))
                other.grad = one.grad.clone()
            states = step(groups, states)
            for param, state in zip(several, states, strict=True):
                if why := why_not_stored(state, param):
                    raise Coupled(why)
            alone = [step([([p], group)], [state])[0] for (p, group), state in zip(single, alone, strict=True)]
    except Coupled:
        raise
    except Exception as error:
        raise Coupled(f"a step over tiny tensors ended in {type(error).__name__}: {error}") from error
    if not torch.equal(before, torch.get_rng_state()):
        raise Coupled("its step() draws random numbers, which depend on the order of parameters")
    if not all(torch.equal(one, other) for one, (other, _) in zip(several, single, strict=True)):
        raise Coupled("a parameter's update depends on the other parameters of the step")
    if several:
        _check_waits_for_gradients(step, groups, several, states)


def _check_waits_for_gradients(
    step: Step, groups: Groups, params: Sequence[nn.Parameter], states: Sequence[dict[str, Any]]
) -> None:
    """Raise Coupled if a step changes parameters or states without a gradient, which an engine leaves alone."""
    before, kept = [param.detach().clone() for param in params], [copied(state) for state in states]
    for param in params:
        param.grad = None
    try:
        after = step(groups, states)
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
