"""Hooks on an unmodified model: acquire units during a module's forward, and fetch them when read elsewhere."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_map_only

from infinity.comm.dtensor import unwrapped
from infinity.errors import UsageError
from infinity.model import bitsandbytes
from infinity.model.added import StateCopies
from infinity.model.backward import ComingGradients, Engine
from infinity.units import binding, residents
from infinity.units.compiled import (
    HOOKS_REFUSED,
    breaks_graphs,
    eager,
    exchange_callback,
    refused_derivative,
    runs_as_it_is,
    transformed,
    wraps,
)
from infinity.units.residents import Fetcher
from infinity.units.unit import Residency, Unit

_REGISTER = nn.Module.register_parameter.__code__


class UnitParameters(dict[str, Any]):
    """A module's `_parameters` that fetches the unit of a parameter when the model's code reads it.

    Models read weights outside the module that owns them (DeBERTa, Mamba, tied heads), without registration. While
    torch.func.functional_call replaces parameters by tensors, reads return these tensors.
    """

    def __init__(
        self, parameters: dict[str, Any], fetcher: Fetcher, coming: ComingGradients, replaced: Counter[int]
    ) -> None:
        super().__init__(parameters)
        owners = {name: residents.owners_of(p) for name, p in parameters.items() if p is not None}
        self._units = {name: tuple({owner.unit: None for owner in each}) for name, each in owners.items() if each}
        """Name → its unit, or the units of a wrapper's inner tensors."""
        self._managed = {name: parameters[name] for name in self._units}
        self._fetcher = fetcher
        self._trace = fetcher.schedule.trace
        self._use = eager(self._fetch)
        self._coming = coming
        self._scope = fetcher.scope
        self._replaced = replaced

    @runs_as_it_is
    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if is_dynamo_compiling():
            self._check_held(name)
            return parameter
        if not self._scope.depth:
            return parameter  # its type fetches the unit
        # A parameter that torch.func has replaced has values of its own.
        units = self._units.get(name)
        if units is None or parameter is not self._managed[name]:
            return parameter
        for unit in units:
            # Reads of the unit in use are the usual case, and cost these comparisons only.
            if unit.residency is not Residency.RESIDENT or self._trace.last != unit.index:
                self._use(unit)
        if not units[0].layout.trainable and parameter.requires_grad:
            units[0].check_frozen()  # the module's forward may never be called, as with a ParameterDict
        return parameter

    def _fetch(self, unit: Unit) -> None:
        self._fetcher.use(unit)
        if not unit.pin_count:
            self._coming.ran(unit)

    @property
    def is_alone(self) -> bool:
        """Return whether one rank fetches the units, so that its data may decide which."""
        return self._fetcher.schedule.alone

    def expect(self, modules: Sequence[UnitParameters]) -> None:
        """Fetch next the units of `modules` that are not held, in order. The trace leaves these uses out."""
        units = dict.fromkeys(
            unit.index for each in modules for held in each._units.values() for unit in held if not unit.pin_count
        )
        self._trace.expect(units)

    def _check_held(self, name: str) -> None:
        """Break the graph being traced if the unit is not held: the inputs of a graph stay resident while it runs."""
        for unit in self._units.get(name, ()):
            if not unit.pin_count:
                self._use(unit)

    def __setitem__(self, name: str, value: Any) -> None:
        managed = self._managed.get(name)
        if managed is not None and value is not managed and sys._getframe(1).f_code is _REGISTER:
            raise UsageError(
                f"{name} was given another parameter while an engine has the model, but the engine trains the former "
                "one. Close the engine with engine.close(restore=True), which returns the values to the model, change "
                f"the model and make a new engine. To change only values, assign to {name}.data, or edit it in place."
            )
        if managed is not None:
            if value is not managed and isinstance(value, torch.Tensor):
                inner = unwrapped(value)
                owner = residents.owner_of(inner) if inner is not value else None
                if owner is not None:  # a torch.func wrapper has captured the placeholder
                    raise transformed(owner.unit.layout.slots[owner.slot].name)
            for index in (unit.index for unit in self._units[name]):
                self._replaced[index] += (self.get(name) is managed) - (value is managed)
                if not self._replaced[index]:
                    del self._replaced[index]
        super().__setitem__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse("be copied (copy.deepcopy, AveragedModel)")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("be pickled (pickle, torch.save of a module)")


def _refuse(what: str) -> NoReturn:
    raise UsageError(
        f"the model cannot {what} while an engine has its parameters: read engine.state_dict(), or "
        "engine.save_checkpoint(). For a second model, construct it and load these values by load_state_dict()."
    )


def _refuse_script() -> NoReturn:
    _refuse("be scripted or traced, since TorchScript reads parameters without Python,")


class ModelHooks:
    """Installs all hooks on a model; `remove` removes them."""

    def __init__(
        self,
        model: nn.Module,
        units_of_module: dict[nn.Module, list[Unit]],
        fetcher: Fetcher,
        coming: ComingGradients,
        engine: Engine,
    ) -> None:
        self._model = model
        self._engine = engine
        self._fetcher = fetcher
        self._coming = coming
        self._scope = fetcher.scope
        self._replaced: Counter[int] = Counter()
        """unit → number of its parameters that are currently replaced by other tensors."""
        self._members: Counter[int] = Counter()
        """unit → number of names under which modules register its parameters."""
        self._open = True
        self._loads = False
        self.ignores_moves = False
        """True to leave parameters where they are when the model is moved to another device, without an error."""
        self._copies = StateCopies()
        self._handles: list[Any] = []
        self._wrapped = [module for module in model.modules() if module._parameters]
        for module in self._wrapped:
            parameters = UnitParameters(module._parameters, fetcher, coming, self._replaced)
            self._members.update(unit.index for unit in chain(*parameters._units.values()))
            module.__dict__["_parameters"] = parameters
            put = functools.partial(self._copies.put)  # a partial accepts the attributes that torch sets on a hook
            self._handles.append(module.register_state_dict_post_hook(put))
            self._handles.append(module.register_load_state_dict_pre_hook(self._refuse_state))
        self._handles += bitsandbytes.follow(model)
        self._forwards: list[tuple[nn.Module, Any, Any]] = []
        for module in dict.fromkeys([model, *units_of_module]):
            self._wrap_forward(module, units_of_module.get(module, []))
        for module in model.modules():
            module.__dict__["_apply"] = functools.partial(self._apply, module)
            module.__dict__["__prepare_scriptable__"] = _refuse_script  # torch.jit.script calls it

    def remove(self) -> None:
        self._open = False
        for handle in self._handles:
            handle.remove()
        for module in self._wrapped:
            module.__dict__["_parameters"] = dict(module._parameters.items())
        for module, ours, before in self._forwards:
            if module.__dict__.get("forward") is ours:  # else another wrapper is on top and calls ours
                if before is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = before
        for module in self._model.modules():
            module.__dict__.pop("_apply", None)
            module.__dict__.pop("__prepare_scriptable__", None)

    def ignore_moves(self) -> None:
        """Leave parameters where they are from now on when the model is moved to another device, without an error."""
        self.ignores_moves = True

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Permit `load_state_dict` of the model and its parts, whose copies into parameters fetch unit after unit."""
        before, self._loads = self._loads, True
        try:
            yield
        finally:
            self._loads = before

    def _refuse_state(self, module: nn.Module, *_: Any) -> None:
        """Raise UsageError unless the module's units are held, since one rank alone can't fetch a unit."""
        units = chain(*module._parameters._units.values())  # type: ignore[attr-defined]
        if not self._loads and not all(unit.pin_count for unit in units):
            raise UsageError(
                f"load_state_dict() was called on a model (on its {type(module).__name__}) while an engine has its "
                "parameters. Load them before infinity.initialize(), use engine.load_checkpoint(), or call it within "
                "infinity.GatheredParameters(model.parameters(), modifier_rank=0)."
            )

    def check_replaced(self) -> None:
        """Raise UsageError if modules hold tensors in place of parameters, outside of a call that replaces them.

        torch.func.functional_call leaves its tensors in a module that the model has under two names.
        """
        for module in self._wrapped if self._replaced else ():
            for name, parameter in module._parameters.items():
                managed = module._parameters._managed.get(name)  # type: ignore[attr-defined]
                if managed is not None and parameter is not managed:
                    raise UsageError(
                        f"{name} of a {type(module).__name__} is another tensor than the parameter that the engine "
                        "trains. torch.func.functional_call leaves its tensors behind in a module that the model has "
                        "under two names: pass it tie_weights=False. To go on, set the module's _parameters"
                        f"[{name!r}] to the parameter of optimizer.param_groups again."
                    )

    # -- forward -----------------------------------------------------------------------------------------------------

    def _wrap_forward(self, module: nn.Module, units: list[Unit]) -> None:
        """Wrap `module.forward` so that it holds `units` while it runs.

        Forward hooks do not suffice: if another pre-hook raises first, PyTorch skips this module's pre-hook but still
        calls its hook after the forward.
        """
        call, scope, fetcher, coming = module.forward, self._scope, self._fetcher, self._coming
        is_root, engine = module is self._model, self._engine
        inner = engine._around(call) if is_root else call
        before = module.__dict__.get("forward")
        of_class = type(module).forward

        @wraps(call)
        def forward(*args: Any, **kwargs: Any) -> Any:
            # Another wrapper may keep this function after the engine was closed.
            if not self._open:
                return call(*args, **kwargs)
            if torch._C._get_tracing_state() is not None:
                _refuse_script()
            # The engine's own code runs outside of graphs [Note: compiled models].
            compiling = exchange_callback(None)
            installed, held = None, list[Unit]()
            try:
                installed = scope.enter(self.check_entry)
                if is_root and scope.depth == 1 and torch._C._current_graph_task_id() == -1:
                    engine._on_forward((args, kwargs))
                    coming.begin_forward((args, kwargs))
                for unit in units:
                    # A unit with all of its parameters replaced is not needed: functional_call brings its own.
                    if not self._replaced or self._replaced[unit.index] < self._members[unit.index]:
                        fetcher.hold(unit)
                        held.append(unit)
                        coming.ran(unit)
                run: Any = inner
                if before is None and type(module).forward is not of_class:
                    run = type(module).forward.__get__(module)  # the class was patched or replaced
                    run = engine._around(run) if is_root else run
                exchange_callback(compiling)
                try:
                    output = run(*args, **kwargs)
                except RuntimeError as error:
                    if HOOKS_REFUSED in str(error):
                        # Without a name: a variable of this frame would keep the error, which keeps the frame.
                        raise refused_derivative() from error
                    raise
                finally:
                    exchange_callback(None)
                # An output that views the buffer would change once another unit is there.
                return _own_outputs(output)
            finally:
                for unit in held:
                    fetcher.unhold(unit)
                if installed is not None:
                    if is_root and scope.depth == 1:
                        coming.end_forward()
                        if not torch.is_grad_enabled():
                            # Uses before the next forward are a cycle of their own: `generate` calls an encoder
                            # directly.
                            fetcher.schedule.trace.begin("outside")
                    scope.leave(installed)
                exchange_callback(compiling)

        module.__dict__["forward"] = breaks_graphs(forward)
        self._forwards.append((module, forward, before))

    def check_entry(self) -> None:
        """Check the engine and the model when its code is entered."""
        if torch._C._current_graph_task_id() == -1:
            self._engine._on_entry()
            self._copies.check()

    def _apply(self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Replaces `module._apply`, which `.to()`, `.half()` and `.cuda()` call. Applies `fn` to buffers only.

        Raises UsageError before any change if `fn` would change the dtype or device of a managed parameter.
        `ignores_moves`: the dtype.
        """
        for parameter in module.parameters(recurse):
            if residents.owners_of(parameter):
                # A probe without elements shows what `fn` does, before anything is changed.
                before = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
                after = fn(before)
                stays = after.device == before.device or self.ignores_moves
                if after.dtype != before.dtype or not stays:
                    fix = 'Convert the model before infinity.initialize(), or set "bf16" or "fp16" in the config.'
                    if after.device != before.device:
                        fix = "The engine computes on engine.device, a CUDA device if there is one: move inputs there."
                    raise UsageError(
                        f"{type(module).__name__} was to be moved to {after.dtype} on {after.device} while an engine "
                        f"has its parameters, which are {before.dtype} on {before.device}. {fix} Nothing was changed."
                    )
        for part in module.modules() if recurse else [module]:
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = fn(buffer)
        return module


def _own_outputs(output: Any) -> Any:
    """Return the output with views of a unit's buffer cloned. Parameters and their whole data (`.data`) are returned
    unchanged, since callers edit them.
    """
    changed = False

    def own(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal changed
        found = residents.behind(tensor)
        if found is None or residents.owner_of(tensor) is not None:
            return tensor
        if tensor.grad_fn is None and binding.is_whole(found[0], tensor):
            return tensor
        changed = True
        return tensor.clone()

    if type(output) is torch.Tensor:
        return own(output)
    owned = tree_map_only(torch.Tensor, own, output)
    return owned if changed else output
