"""`optimizer.parameter_offload` of a stage 3 engine, whose hooks TRL and ms-swift remove while a model generates."""

from __future__ import annotations

from typing import Any

from torch import nn


class DeepSpeedZeRoOffload:
    """Stands for DeepSpeed's hooks that fetch parameters, without effect: a parameter is fetched where it is read.

    Hooks may be removed from the lists, and `_register_deepspeed_module` may be called, in any order.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = _Model(module)
        """Reads like the model, and has `ds_external_parameters`."""
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any, count: Any = None) -> None:
        """Do nothing; in DeepSpeed it adds the hooks of `module`."""


class _Model:
    """The attributes of a model, and those that DeepSpeed adds to it. The model itself gets none."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def ds_external_parameters(self) -> list[tuple[Any, nn.Parameter]]:
        """Return the parameters of `zero.register_external_parameter`, which has no effect."""
        return []
