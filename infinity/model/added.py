"""Finds parameters added to a model after the construction of its engine, which would neither train nor save them.

torch calls global hooks whenever a parameter or a module is registered in any module. The hooks here only set a flag
for modules of the engine's model; the next forward then searches the model. Without changes a forward costs one
comparison.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from infinity.errors import UsageError


class Additions:
    """Watches the modules of `model` until it is closed or dropped."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = {module: _held(module) for module in model.modules()}
        """module → name in it → parameter, for the parameters that the engine manages."""
        self._names = dict(model.named_parameters(remove_duplicate=False))
        self._changed = False
        watch = _Watch(self)
        handles = [register_module_parameter_registration_hook(watch), register_module_module_registration_hook(watch)]
        self._finalizer = weakref.finalize(self, _remove, handles)

    def note(self, module: nn.Module) -> None:
        """Record a registration in `module`, which may belong to any model."""
        # torch calls the hook for every module of the process.
        if module in self._known:
            self._changed = True

    def check(self) -> None:
        """Raise UsageError for the first parameter that the engine does not manage, or saves under another name."""
        if self._changed:
            self._look()

    def _look(self) -> None:
        for path, module in self._model.named_modules(remove_duplicate=False):
            known = self._known.get(module, {})
            for name, parameter in _held(module).items():
                full = f"{path}.{name}" if path else name
                if known.get(name) is not parameter:
                    raise UsageError(
                        f"parameter {full} ({type(module).__name__}) was added to the model while an engine has it. "
                        "The engine would neither train nor save it. Close the engine with "
                        "engine.close(restore=True), which returns the values to the model, and make a new engine; or "
                        "remove the parameter to continue without it."
                    )
                if self._names.get(full, parameter) is not parameter:
                    raise self._exchanged(full, parameter)
        for module in self._model.modules():  # modules without parameters may get one later
            self._known.setdefault(module, {})
        self._changed = False

    def _exchanged(self, name: str, parameter: nn.Parameter) -> UsageError:
        other = next(each for each, known in self._names.items() if known is parameter)
        return UsageError(
            f"{name} of the model is now {other}, since a module was replaced by another while an engine has the "
            "model. The engine saves the former parameter under that name. Undo the replacement; or close the engine "
            "with engine.close(restore=True), change the model and make a new engine."
        )

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        self._finalizer()


class _Watch:
    """Hook that torch calls. Its weak reference allows an engine to be freed without `close`."""

    def __init__(self, additions: Additions) -> None:
        self._additions = weakref.ref(additions)

    def __call__(self, module: nn.Module, name: str, value: object) -> None:
        additions = self._additions()
        if additions is not None and value is not None:
            additions.note(module)


def _held(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter of `module` itself. `items()` fetches no unit, unlike reads of single names."""
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
