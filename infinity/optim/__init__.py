"""Optimizers: the native CPU update, the streamed update of units, gradients and learning rates.

`CPUAdam` is an optimizer for any model in host memory, without an engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.optim.cpu_optimizer import CPUAdam

__all__ = ["CPUAdam"]


def __getattr__(name: str) -> Any:
    if name != "CPUAdam":
        raise AttributeError(f"module 'infinity.optim' has no attribute {name!r}")
    from infinity.optim.cpu_optimizer import CPUAdam

    return CPUAdam
