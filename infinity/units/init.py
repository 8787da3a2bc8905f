"""Bring a model's values into their tiers unit by unit, so that construction needs no more memory than training.

A model built on the meta device is initialised here: each unit's modules are given real parameters on the host,
initialised, moved to their tier and let go before the next unit's are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from infinity.errors import ModelError
from infinity.units.layout import UnitLayout
from infinity.units.states import Flats, flat_tensor


def initializer(model: nn.Module) -> Callable[[nn.Module], None]:
    """How `model` initialises one module: `model.initialize_module`, transformers' `_init_weights`, or
    `reset_parameters`.
    """
    for name in ("initialize_module", "_init_weights"):
        own = getattr(model, name, None)
        if callable(own):
            return own  # type: ignore[no-any-return]

    def reset(module: nn.Module) -> None:
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()  # type: ignore[operator]
        elif next(module.parameters(recurse=False), None) is not None:
            raise ModelError(
                f"{type(module).__name__} was built on the meta device and has no reset_parameters(): give it one, "
                "give the model an "
                "initialize_module(module) method, or build the model on the cpu."
            )

    return reset


def materialize(model: nn.Module, root: str, roots: set[str]) -> dict[nn.Parameter, nn.Parameter]:
    """Give the modules that stand at `root`, other units' subtrees left out, real initialised parameters instead of
    meta ones.

    Returns meta parameter → new parameter. Shared parameters stay shared over the whole model.
    """
    scope = list(_scope(model.get_submodule(root), root, roots))
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in scope:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta and parameter not in replaced:
                real = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                replaced[parameter] = nn.Parameter(real, requires_grad=parameter.requires_grad)
    if not replaced:
        return replaced
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in replaced:
                module._parameters[name] = replaced[parameter]
    initialize = initializer(model)
    for module in scope:
        initialize(module)
    return replaced


def _scope(module: nn.Module, path: str, roots: set[str]) -> Iterator[nn.Module]:
    """Children before parents, as `Module.apply` goes."""
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if child_path not in roots:
            yield from _scope(child, child_path, roots)
    yield module


def check_buffers(model: nn.Module) -> None:
    """Buffers are not initialised here: one that is still on the meta device is an error."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"buffer {name} is on the meta device, and only its module knows its values. Compute it under "
                "`with torch.device('cpu')`, or build the model on the cpu."
            )


def initial_states(layout: UnitLayout, values: Sequence[torch.Tensor]) -> Flats:
    """A unit's states before the first step, from its parameters' values in slot order; moments are left out, being
    zero.
    """
    name, dtype = ("master", torch.float32) if layout.trainable else ("param", layout.dtype)
    flat = flat_tensor(layout.numel, dtype)
    for slot, value in zip(layout.slots, values, strict=True):
        flat[slot.offset : slot.stop].view(slot.shape).copy_(value)
    return {name: flat}
