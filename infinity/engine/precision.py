"""Precision of the model's forward: the casts of `auto_cast`, and the context of `torch_autocast`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from infinity.plan.policy import DTYPES
from infinity.units.compiled import breaks_graphs

if TYPE_CHECKING:
    from infinity.config import Config


@dataclass(frozen=True)
class ForwardPrecision:
    """The dtypes that a config sets for forwards of the model."""

    device_type: str
    inputs: torch.dtype | None
    """Dtype to which floating-point inputs are cast; None: they stay as they are."""
    autocast: torch.dtype | None
    """Dtype of `torch.autocast` around the forward; None: the caller's context applies."""

    @classmethod
    def of(cls, config: Config, device: torch.device, dtype: torch.dtype | None) -> ForwardPrecision | None:
        """Return the precision of forwards on `device`, or None if the config changes nothing.

        dtype: that of all floating-point parameters; None: their own.
        """
        casts = any(section.enabled and section.auto_cast for section in (config.bf16, config.fp16))
        section = config.torch_autocast
        autocast = DTYPES[section.dtype] if section.enabled and section.dtype is not None else None
        if not casts and autocast is None:
            return None
        return cls(device.type, dtype if casts else None, autocast)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that casts its positional arguments and calls `call` under autocast."""
        inputs, autocast = self.inputs, self.autocast

        def run(*args: Any, **kwargs: Any) -> Any:
            if inputs is not None:
                args = cast(args, inputs)
            if autocast is None:
                return call(*args, **kwargs)
            with torch.autocast(self.device_type, autocast, cache_enabled=False):  # see `Scope.enter` on the cache
                return call(*args, **kwargs)

        return breaks_graphs(run)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with floating-point tensors cast to `dtype`, in nested lists, tuples and dicts, too."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    return value
