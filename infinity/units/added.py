"""Parameters that a model got after its engine was made: it would neither move nor train nor save them.

torch calls hooks for every registration of a parameter or a module anywhere. They only note that one of the engine's
modules was changed; what was changed is looked for at the next forward. Where nothing was, that costs one comparison.
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
        """The parameters that the engine has, by the module and the name under which it binds them."""
        self._changed = False
        watch = _Watch(self)
        handles = [register_module_parameter_registration_hook(watch), register_module_module_registration_hook(watch)]
        self._finalizer = weakref.finalize(self, _remove, handles)

    def note(self, module: nn.Module) -> None:
        """Something was registered in `module`, of whatever model."""
        if module in self._known:
            self._changed = True

    def check(self) -> None:
        """UsageError that names the first parameter which the engine does not have."""
        if self._changed:
            self._look()

    def _look(self) -> None:
        for path, module in self._model.named_modules():
            known = self._known.get(module, {})
            for name, parameter in _held(module).items():
                if known.get(name) is not parameter:
                    full = f"{path}.{name}" if path else name
                    raise UsageError(
                        f"parameter {full} ({type(module).__name__}) was added to the model while an engine has it, "
                        "which would neither train nor save it: save a checkpoint if the training so far is wanted, "
                        "close the engine, change the model and make a new one; or take the parameter away again."
                    )
        for module in self._model.modules():  # those without parameters, which may yet get some
            self._known.setdefault(module, {})
        self._changed = False

    def close(self) -> None:
        """Idempotent."""
        self._finalizer()


class _Watch:
    """torch's hook, which must not keep an engine that nobody closed."""

    def __init__(self, additions: Additions) -> None:
        self._additions = weakref.ref(additions)

    def __call__(self, module: nn.Module, name: str, value: object) -> None:
        additions = self._additions()
        if additions is not None and value is not None:
            additions.note(module)


def _held(module: nn.Module) -> dict[str, nn.Parameter]:
    """Without its values being fetched, as reading them one by one would."""
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
