"""Returns parameters to a model when its engine is closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from infinity.comm.dtensor import set_local
from infinity.errors import OutOfMemoryError
from infinity.observe.log import logger
from infinity.observe.units import show_bytes
from infinity.plan.placement import State
from infinity.tiers.available import available_memory
from infinity.units import released

if TYPE_CHECKING:
    from infinity.engine.parts import EngineParts


def restoring(parts: EngineParts, *, everything: bool) -> Callable[[], None]:
    """Read the parameters from their tiers, and return a function that assigns them. Call that after the engine has
    removed its hooks and buffers.

    All are on the device if they fit there beside the engine's buffers; otherwise all are in host memory.

    everything: include parameters on nvme or sharded over ranks, and raise OutOfMemoryError if they do not fit in host
    memory; the call is collective then. Otherwise restore nothing if parameters are on nvme, sharded or do not fit.
    """
    tiers = parts.plan.placement.tiers(State.PARAM)
    in_memory = all(tier.in_memory for tier in tiers) and parts.ranks.shards == 1
    if not (everything or in_memory):
        return lambda: None
    needed, device = sum(unit.layout.nbytes for unit in parts.units), parts.device
    on_host = device.host_addressable or needed > device.available_bytes()
    if on_host and not _fits_on_host(parts, needed, everything=everything):
        return lambda: None
    values: list[list[torch.Tensor]] = []
    for unit in parts.units:
        flat = parts.states.read_param(unit.layout)
        slots = [flat[slot.offset : slot.stop].view(slot.shape) for slot in unit.layout.slots]
        if not on_host:
            try:
                values.append([slot.to(device.torch_device, copy=True) for slot in slots])
                continue
            except torch.OutOfMemoryError:  # beyond infinity.memory.device, or the memory is in fragments
                if not _fits_on_host(parts, needed, everything=everything):
                    return lambda: None
                on_host, values = True, [[value.to(device.host) for value in tensors] for tensors in values]
        values.append([slot.to(device.host, copy=True) for slot in slots])
    if on_host and not device.host_addressable:
        logger.warning(
            "%s of parameters of the closed engine do not fit on %s beside its buffers: they are in host memory. Call "
            "model.to() to move them.",
            show_bytes(needed),
            device.torch_device,
        )

    def restore() -> None:
        for unit, tensors in zip(parts.units, values, strict=True):
            released.restore(unit.parameters)
            for parameter, tensor in zip(unit.parameters, tensors, strict=True):
                set_local(parameter, tensor)

    return restore


def _fits_on_host(parts: EngineParts, needed: int, *, everything: bool) -> bool:
    """Return whether `needed` bytes fit in this rank's part of the free memory. everything: OutOfMemoryError if not."""
    available = available_memory() // parts.ranks.local_size
    if needed > available and everything:
        hint = "save a checkpoint before closing the engine, and load it in parts"
        raise OutOfMemoryError("host memory, for the parameters of the closed engine", needed, available, hint)
    return needed <= available
