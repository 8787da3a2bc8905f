"""Returns parameters to a model when its engine is closed.

Frees the device's memory between phases of a program, such as generation by another engine, and restores it.

Ends an engine that was not closed, wherever the garbage collector finds it.
"""

from __future__ import annotations

import _thread
import concurrent.futures.thread
import os
import threading
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from infinity.comm.dtensor import set_local
from infinity.comm.thread import is_collective
from infinity.engine.parts import EngineParts
from infinity.errors import LifetimeError, OutOfMemoryError
from infinity.observe.log import logger
from infinity.plan.placement import State
from infinity.sizes import show_bytes
from infinity.tiers.available import available_memory
from infinity.tiers.freed import return_freed_memory
from infinity.tiers.slab import SlabTier
from infinity.units import released
from infinity.units.stored import follow_device


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
            released.restore(unit)
            for parameter, tensor in zip(unit.parameters, tensors, strict=True):
                set_local(parameter, tensor)
        follow_device(chain(*(unit.wrappers for unit in parts.units)))

    return restore


def _fits_on_host(parts: EngineParts, needed: int, *, everything: bool) -> bool:
    """Return whether `needed` bytes fit in this rank's part of the free memory. everything: OutOfMemoryError if not."""
    available = available_memory() // parts.ranks.local_size
    if needed > available and everything:
        hint = "save a checkpoint before closing the engine, and load it in parts"
        raise OutOfMemoryError("host memory, for the parameters of the closed engine", needed, available, hint)
    return needed <= available


def offload(parts: EngineParts) -> None:
    """Move the states on the device to host memory, and free the device's buffer pools. All units must be released.

    Buffers that the script's own views refer to stay, as always.
    """
    pools = parts.pools.of_tier("device")
    leased = sum(pool.leased for pool in pools)
    if leased:
        raise LifetimeError(f"internal error: {leased} buffers of the device are leased after all units were released")
    if parts.training is not None:
        parts.training.pipeline.forget_buffers()
        if parts.training.passing is not None:
            parts.training.passing.clear()
    for tier in _slabs(parts):
        tier.offload()
    for pool in pools:
        pool.dismiss()
    return_freed_memory()
    if parts.device.torch_device.type == "cuda":
        torch.cuda.empty_cache()


def reload(parts: EngineParts) -> None:
    """Move the states back to the device, and allocate its buffer pools again."""
    if parts.training is not None:
        parts.training.pipeline.forget_buffers()
    for tier in _slabs(parts):
        tier.reload()
    for pool in parts.pools.of_tier("device"):
        pool.recall()


def _slabs(parts: EngineParts) -> list[SlabTier]:
    return [tier for tier in parts.tiers.values() if isinstance(tier, SlabTier)]


_MOMENT = 1.0
"""Seconds for which other threads hold one of the locks, at most."""

LOCKS: list[Any] = [
    lock
    for module, name in (
        (threading, "_shutdown_locks_lock"),  # until Python 3.12
        (threading, "_active_limbo_lock"),
        (concurrent.futures.thread, "_global_shutdown_lock"),
    )
    if (lock := getattr(module, name, None)) is not None
]
"""Locks that Python holds while it starts threads, and takes when they end."""


def end_collected(close: Callable[[], None], process: int) -> None:
    """Call `close`, but in a forked child, where the engine's threads do not exist and joining them would hang.

    The collector may call this in the middle of Python's own code that starts a thread, which holds a lock that the
    engine's threads need to end, or of a collective, for which a save waits. Another thread then closes, and this one
    does not wait.
    """
    if os.getpid() != process:
        return
    if not is_collective() and all(map(_can_be_taken, LOCKS)):
        close()
    else:
        _thread.start_new_thread(close, ())  # threading.Thread would take the locks


def _can_be_taken(lock: Any) -> bool:
    """Return False if this thread holds `lock`."""
    is_owned = getattr(lock, "_is_owned", None)  # an RLock's
    if is_owned is not None:
        return not is_owned()
    if not lock.acquire(timeout=_MOMENT):
        return False
    lock.release()
    return True
