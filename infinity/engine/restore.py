"""Returns parameters to a model when its engine is closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from infinity.comm.dtensor import set_local
from infinity.errors import OutOfMemoryError
from infinity.plan.placement import State
from infinity.tiers.available import available_memory
from infinity.units import released

if TYPE_CHECKING:
    from infinity.engine.parts import EngineParts


def restoring(parts: EngineParts, *, everything: bool) -> Callable[[], None]:
    """Read the parameters from their tiers, and return a function that assigns them. Call that after the engine has
    removed its hooks and buffers.

    everything: include parameters on nvme or sharded over ranks, and raise OutOfMemoryError if they do not fit in host
    memory; the call is collective then. Otherwise restore nothing if parameters are on nvme, sharded or do not fit.
    """
    in_memory = "nvme" not in parts.plan.placement.tiers(State.PARAM) and parts.ranks.shards == 1
    if not (everything or in_memory):
        return lambda: None
    needed, available = sum(unit.layout.nbytes for unit in parts.units), available_memory()
    if needed > available:
        if everything:
            hint = "save a checkpoint before closing the engine, and load it in parts"
            raise OutOfMemoryError("host memory, for the parameters of the closed engine", needed, available, hint)
        return lambda: None
    device = parts.device.torch_device
    values: list[list[torch.Tensor]] = []
    for unit in parts.units:
        flat = parts.states.read_param(unit.layout)
        values.append(
            [flat[slot.offset : slot.stop].view(slot.shape).to(device, copy=True) for slot in unit.layout.slots]
        )

    def restore() -> None:
        for unit, tensors in zip(parts.units, values, strict=True):
            released.restore(unit.parameters)
            for parameter, tensor in zip(unit.parameters, tensors, strict=True):
                set_local(parameter, tensor)

    return restore
