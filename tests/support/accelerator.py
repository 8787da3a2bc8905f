"""The accelerator that tests/gpu runs on: CUDA, or the device of tests/late if this process has loaded it."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from infinity.tiers.accelerator import AcceleratorDevice

CYCLES = 5_000_000
"""Clock cycles of a delay on CUDA, about 3 ms: far longer than the host takes for the work of a unit."""


def accelerator() -> torch.device | None:
    """Return the first device, or None. Allocates nothing and makes no context on CUDA, so it may run at import."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device(found.type, 0) if found is not None and found.type in ("cuda", "late") else None


def device() -> torch.device:
    """Return the first device. Raises AssertionError without one."""
    found = accelerator()
    assert found is not None, "there is no accelerator here"
    return found


def engine_device() -> AcceleratorDevice:
    """Return the engine's device on it."""
    where = device()
    if where.type == "late":
        from late.device import LateAccelerator

        return LateAccelerator(where.index)
    return AcceleratorDevice(where)


def new_stream() -> AbstractContextManager[object]:
    """Return a context in which a new stream is the thread's current one."""
    where = device()
    if where.type == "cuda":
        return torch.cuda.stream(torch.cuda.Stream(where))  # as users write it
    return torch.Stream(where)


def delay() -> None:
    """Keep the current stream busy. Does nothing on "late", whose work runs only when something waits for it."""
    if device().type == "cuda":
        torch.cuda._sleep(CYCLES)
