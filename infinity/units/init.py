"""Bring a model's values into their tiers unit by unit, so that construction needs no more memory than training.

A model built on the meta device is initialised here: each unit's modules are given real parameters on the host,
initialised, moved to their tier and let go before the next unit's are made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from infinity.errors import ModelError
from infinity.units.hooks import UnitParameters
from infinity.units.layout import UnitLayout
from infinity.units.states import Flats, flat_tensor


def initializer(model: nn.Module) -> Callable[[nn.Module], None]:
    """How `model` initialises one module: `model.initialize_module`, transformers' `_init_weights`, or the module's own
    `reset_parameters`.
    """
    for name in ("initialize_module", "_init_weights"):
        own = getattr(model, name, None)
        if callable(own):
            return own  # type: ignore[no-any-return]
    return _reset


def _reset(module: nn.Module) -> None:
    if callable(getattr(module, "reset_parameters", None)):
        module.reset_parameters()  # type: ignore[operator]


def check_values(model: nn.Module) -> None:
    """ModelError for values that are not there and cannot be made: parameters that an engine took, a buffer on the meta
    device, a module nobody knows how to fill.
    """
    for module in model.modules():
        if isinstance(module._parameters, UnitParameters):
            raise ModelError(
                "the model already belongs to an engine: use that one, or close it and build the model anew"
            )
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and parameter.untyped_storage().nbytes() < parameter.nbytes:
            raise ModelError(
                f"parameter {name} holds no values: the model belonged to an engine that was closed. Build it anew, "
                "and load a checkpoint of that engine into the new one."
            )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"buffer {name} is on the meta device, and only its module knows its values. Compute it under "
                "`with torch.device('cpu')`, or build the model on the cpu."
            )
    if initializer(model) is not _reset:
        return
    for name, module in model.named_modules():
        holds = any(parameter.is_meta for parameter in module.parameters(recurse=False))
        if holds and not callable(getattr(module, "reset_parameters", None)):
            raise ModelError(
                f"{name or 'the model'} ({type(module).__name__}) was built on the meta device and has no "
                "reset_parameters(): give it one, give the model an initialize_module(module) method, or build the "
                "model on the cpu."
            )


class Materializer:
    """Gives the parameters of a model on the meta device real values, unit after unit; a model with values keeps them.

    Every module draws from a seed of its own, made of one draw from torch's generator and the module's name: the values
    follow from `torch.manual_seed` and the model alone, not from tiers, units or ranks. (They are not those the model
    would have been built with on the cpu, whose modules draw from one generator in turn, some of them twice.)
    """

    def __init__(self, model: nn.Module, roots: set[str]) -> None:
        """roots: where units stand in the module tree."""
        self._model = model
        self._roots = roots
        self._initialize = initializer(model)
        self._made: dict[nn.Parameter, nn.Parameter] = {}
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        self._seed = int(torch.randint(1 << 62, ())) if on_meta else 0
        self._owner: dict[nn.Parameter, nn.Module] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self._owner.setdefault(parameter, module)

    def materialize(self, root: str, wanted: Sequence[nn.Parameter]) -> tuple[nn.Parameter, ...]:
        """The parameters `wanted`, which belong to the unit that stands at `root`, with values and on the host.

        Shared parameters stay shared over the whole model, with the values that the first module to hold them gives.
        """
        fresh = {
            parameter: nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)
            for parameter in wanted
            if parameter.is_meta
        }
        if fresh:
            self._made.update(fresh)
            for module in self._model.modules():
                for name, held in module._parameters.items():
                    if held is not None and held in fresh:
                        module._parameters[name] = fresh[held]
                        self._owner[fresh[held]] = self._owner[held]
            values = set(fresh.values())
            for path, module in self._scope(self._model.get_submodule(root), root):
                self._fill(path, module, values)
        return tuple(self._made.get(parameter, parameter) for parameter in wanted)

    def _scope(self, module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        """Children before parents, as `Module.apply` goes; subtrees of other units are left out."""
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if child_path not in self._roots:
                yield from self._scope(child, child_path)
        yield path, module

    def _fill(self, path: str, module: nn.Module, values: set[nn.Parameter]) -> None:
        """Initialise one module. What it holds besides `values`, or shares with an earlier module, stands aside."""
        aside = {
            name: held
            for name, held in module._parameters.items()
            if held is not None and not (held in values and self._owner[held] is module)
        }
        for name, held in aside.items():
            module._parameters[name] = nn.Parameter(torch.empty(held.shape, dtype=held.dtype), held.requires_grad)
        own_seed = hashlib.blake2b(path.encode(), digest_size=8, key=self._seed.to_bytes(8, "little")).digest()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(int.from_bytes(own_seed, "little"))
                self._initialize(module)
        finally:
            module._parameters.update(aside)


def initial_states(layout: UnitLayout, values: Sequence[torch.Tensor]) -> Flats:
    """A unit's states before the first step, from its parameters' values in slot order; moments are left out, being
    zero.
    """
    name, dtype = ("master", torch.float32) if layout.trainable else ("param", layout.dtype)
    flat = flat_tensor(layout.numel, dtype)
    for slot, value in zip(layout.slots, values, strict=True):
        flat[slot.offset : slot.stop].view(slot.shape).copy_(value)
    return {name: flat}
