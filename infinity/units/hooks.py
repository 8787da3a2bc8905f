"""Hooks on an unmodified model: units are acquired before a module's forward, let go after it, and fetched when
read elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_map_only

from infinity.errors import UsageError
from infinity.units.saved import unit_behind
from infinity.units.store import UnitStore
from infinity.units.unit import Residency, Unit


class UnitParameters(dict[str, Any]):
    """A module's `_parameters` that fetches the unit of a parameter when the parameter is read.

    Models read weights outside the module that owns them (DeBERTa, Mamba, tied heads); no registration is asked for.
    """

    def __init__(
        self, parameters: dict[str, Any], unit_of: dict[int, Unit], store: UnitStore, outside: Callable[[], bool]
    ) -> None:
        super().__init__(parameters)
        self._units = {name: unit_of[id(p)] for name, p in parameters.items() if p is not None and id(p) in unit_of}
        self._store = store
        self._outside = outside

    def __getitem__(self, name: str) -> Any:
        unit = self._units.get(name)
        if unit is not None:
            if unit.residency is not Residency.RESIDENT or self._store.tracer.last != unit.index:
                self._store.use(unit)
            if not unit.holds:
                unit.lent = True
                unit.exposed = unit.exposed or self._outside()
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._units and isinstance(value, nn.Parameter) and value is not self.get(name):
            raise UsageError(
                f"{name} was given another parameter while an engine has the model, which would go on to train the one "
                "before: close the engine, change the model and make a new one. To change only values, assign to "
                f"{name}.data, or edit it in place."
            )
        super().__setitem__(name, value)


class ModelHooks:
    """Installs all hooks on a model; `remove` takes them away again.

    on_forward(root is called with gradients or not), on_backward (a graph task starts), on_backward_end (it ended
    well).
    """

    def __init__(
        self,
        model: nn.Module,
        units_of_module: dict[nn.Module, list[Unit]],
        unit_of: dict[int, Unit],
        store: UnitStore,
        on_forward: Callable[[], None],
        on_backward: Callable[[], None],
        on_backward_end: Callable[[], None],
    ) -> None:
        self._model = model
        self._store = store
        self._on_forward = on_forward
        self._on_backward = on_backward
        self._on_backward_end = on_backward_end
        self._held: dict[nn.Module, list[int]] = {}
        self._depth = 0
        self._autocast_cache = True
        self._running = 0
        """Forwards under way of modules that hold units."""
        self.in_backward = False
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._enter_root, prepend=True),
            model.register_forward_hook(self._leave_root, always_call=True),
        ]
        for module, units in units_of_module.items():
            self._handles.append(module.register_forward_pre_hook(self._acquire(module, units)))
            self._handles.append(module.register_forward_hook(self._release(module, units), always_call=True))
        self._wrapped = [module for module in model.modules() if module._parameters]
        for module in self._wrapped:
            module.__dict__["_parameters"] = UnitParameters(module._parameters, unit_of, store, self._outside)
            self._handles.append(module.register_state_dict_post_hook(_own_state))
            self._handles.append(module.register_load_state_dict_pre_hook(_refuse_state))

    def _outside(self) -> bool:
        """Whether neither the model's forward nor a backward is running."""
        return self._depth == 0 and torch._C._current_graph_task_id() == -1

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module in self._wrapped:
            module.__dict__["_parameters"] = dict(module._parameters.items())

    # -- forward -----------------------------------------------------------------------------------------------------

    def _enter_root(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._autocast_cache = torch.is_autocast_cache_enabled()
            if torch._C._current_graph_task_id() == -1:
                self._on_forward()

    def _leave_root(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._depth -= 1
        if self._depth == 0:
            torch.set_autocast_cache_enabled(self._autocast_cache)
            if torch.is_grad_enabled():
                # The first gradient to flow is the root output's: there the end of this graph task can be asked for.
                tree_map_only(torch.Tensor, self._watch, output)
            else:
                # What is used until the next forward is a cycle of its own: `generate` calls an encoder by itself.
                self._store.tracer.begin("outside")
        return _own_outputs(output)

    def _watch(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.enter_backward())
        return tensor

    def _acquire(self, module: nn.Module, units: list[Unit]) -> Callable[[nn.Module, Any], None]:
        def acquire(_: nn.Module, args: Any) -> None:
            # Autocast keeps casts of leaf parameters until its context ends: they would fill the memory, and be stale
            # after an update. Set here and not once, as a context that the model enters may switch the cache on again.
            if not self._depth and not self._running:  # a part of the model that is called by itself
                self._autocast_cache = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
            for unit in units:
                self._store.hold(unit)
            self._held.setdefault(module, []).append(len(units))
            self._running += 1

        return acquire

    def _release(self, module: nn.Module, units: list[Unit]) -> Callable[[nn.Module, Any, Any], Any]:
        def release(_: nn.Module, args: Any, output: Any) -> Any:
            held = self._held.get(module)
            if not held:
                return None  # the forward was cut short before its units were acquired
            held.pop()
            self._running -= 1
            if not self._depth and not self._running:
                torch.set_autocast_cache_enabled(self._autocast_cache)
            for unit in units:
                self._store.unhold(unit)
            return _own_outputs(output)

        return release

    # -- backward ----------------------------------------------------------------------------------------------------

    def enter_backward(self) -> None:
        """A graph task is running; ask to be told when it ends. Nested ones (reentrant checkpoints) belong to the
        first.
        """
        if not self.in_backward:
            self.in_backward = True
            self._on_backward()
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.in_backward = False
        self._on_backward_end()

    def reset(self) -> None:
        """Forget a backward that an exception cut short. Called where a forward of the model starts."""
        self.in_backward = False
        self._held = {}
        self._running = 0
        for unit in self._store.units:
            unit.holds = 0

    def abort(self) -> None:
        """Forget a forward that something cut short for which modules call no hooks (Ctrl-C)."""
        self._depth = 0
        torch.set_autocast_cache_enabled(self._autocast_cache)
        self.reset()


def _own_state(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """`state_dict()` of a module: its parameters' values instead of placeholders, fetched unit by unit and copied."""
    for name in module._parameters:
        key = prefix + name
        if key in state and not isinstance(
            state[key], nn.Parameter
        ):  # keep_vars=True asks for the parameters themselves
            parameter = module._parameters[name]
            assert parameter is not None
            state[key] = parameter.detach().clone()


def _refuse_state(module: nn.Module, *_: Any) -> None:
    raise UsageError(
        f"load_state_dict() of {type(module).__name__} was called while an engine has its parameters: load them before "
        "infinity.initialize(), or use engine.load_checkpoint()."
    )


def _own_outputs(output: Any) -> Any:
    """The output with every tensor that is a view of a unit's buffer cloned; None where there is none."""
    changed = False

    def own(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal changed
        if unit_behind(tensor) is None:
            return tensor
        changed = True
        return tensor.clone()

    owned = tree_map_only(torch.Tensor, own, output)
    return owned if changed else None
