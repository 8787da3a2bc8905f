"""Optimizers: the native CPU update, the streamed update of units, gradients and learning rates.

`CPUAdam` is an optimizer for any model in host memory, without an engine. `quantise`, `dequantise` and `frozen_values`
give the values of frozen parameters with `infinity.frozen`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.optim.cpu_optimizer import CPUAdam
    from infinity.optim.frozen import dequantise, frozen_values, quantise

__all__ = ["CPUAdam", "dequantise", "frozen_values", "quantise"]

_MODULES = {"CPUAdam": "cpu_optimizer", "dequantise": "frozen", "frozen_values": "frozen", "quantise": "frozen"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'infinity.optim' has no attribute {name!r}")
    return getattr(import_module(f"infinity.optim.{_MODULES[name]}"), name)
