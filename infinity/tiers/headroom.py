"""Spares the last host memory of a process, and warns before it is taken [Note: memory that no plan counts].

A plan counts no activations, since they depend on the batch. A process that exceeds the memory of its container is
killed without a message.
"""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from enum import Enum

import torch

from infinity.concurrency import now
from infinity.observe.log import logger
from infinity.plan.plan import Plan
from infinity.sizes import show_bytes
from infinity.tiers.available import available_memory, memory_limit, total_memory
from infinity.tiers.freed import keep_freed_blocks, return_freed_blocks, return_freed_memory

_INTERVAL = 0.005
"""Seconds between two looks, each of which takes 6 microseconds: small units take less, and no memory to speak of."""
_GROWN = 4 << 20
"""Bytes by which the process's peak grows before what is left is looked at, which takes a quarter of a millisecond."""
_LEAST = 16 << 20
"""Bytes below which the next allocation of any kind may fail."""
_FREED_OF_ACTIVATIONS, _FREED_OF_PEAK = 2, 0.5
"""Shares that glibc keeps in freed blocks at most: 1.8 times the activations and 0.39 of the peak were measured."""
_OF_BACKWARD = 2
"""Gradients of the largest parameter that are kept free for the loss and backward: a tied embedding has three at once,
and the loss of a language model takes a few copies of its logits."""
PROCESS = 32 << 20
"""Bytes of host memory that a process takes beside the plan until its second step, without activations: threads,
libraries that forward and backward load, Python's objects. 25 MB were measured with a small GPT-2 and torch 2.13."""


class Pass(Enum):
    """Pass of the model in which a unit is used."""

    FORWARD = "keeps activations for a backward"
    WITHOUT_GRAPH = "keeps none: evaluation, or a block that a reentrant checkpoint runs again"
    BACKWARD = "frees them, and computes those again that checkpoints dropped"


@dataclass(frozen=True)
class Use:
    """A use of a unit. cycle: number of the forward and its backward."""

    unit: str
    cycle: int
    within: Pass


@dataclass(frozen=True)
class Planned:
    """Facts of a plan that a warning depends on.

    gradient: bytes of the largest parameter's gradient, which autograd allocates in host memory; 0: it allocates none.
    dtype_option: of `plan_command`.
    """

    gradient: int = 0
    dtype_option: str = ""

    @classmethod
    def of(cls, plan: Plan) -> Planned:
        return cls(of_largest_gradients(plan) // _OF_BACKWARD, dtype_option(plan))


class Headroom:
    """Returns freed blocks to the system while memory is short, and logs one warning if less is left than the model has
    taken since the last peak [Note: freed blocks].
    """

    def __init__(self, planned: Planned | None = None, *, watches: bool = True) -> None:
        self._planned = planned or Planned()
        self._watches = watches
        self._warned = False
        self._looked = 0.0
        self._first = self._peak = -1
        """Resident bytes at the first use of a unit, and the most at any; -1: none yet. Until the first use, a script
        may load its data."""
        self._measured: tuple[int, Pass] | None = None
        """(cycle, its last known pass) of the first forward and backward; None: not begun."""
        self._settled = False

    def is_due(self) -> bool:
        """Return whether the next use of a unit is to be passed to `look`."""
        if not self._watches or (moment := now()) - self._looked < _INTERVAL:
            return False
        self._looked = moment
        return True

    def look(self, use: Use) -> None:
        """Look at what is left before a use, if the process has a new peak."""
        resident = _resident()
        if self._peak < 0:
            self._first = self._peak = resident
        if not self._settled:
            self._settle(use)
        grown = resident - self._peak
        if grown < _GROWN:
            return
        self._peak = resident
        # Reading a container's counters takes longer than the rest, so only a new peak is worth it.
        left = available_memory()
        if left < scarce(resident, resident - self._first):
            return_freed_blocks()
            return_freed_memory()
            left = available_memory()
        if self._warned or left >= grown + _LEAST + _of_backward(use, self._planned):
            return
        # Once: a step that memory does not hold would repeat it for each unit.
        self._warned = True
        # No error: the units that follow may need less, and only the kernel knows what it can reclaim.
        logger.warning("%s", warning(use, left, grown, self._planned))

    def _settle(self, use: Use) -> None:
        """Return freed blocks in the first forward and backward, whose activations nobody knows. Then keep them, which
        is faster, if memory is left for them.
        """
        if self._measured is None:
            if use.within is Pass.FORWARD:
                return_freed_blocks()
                self._measured = use.cycle, use.within
        elif use.cycle == self._measured[0]:
            self._measured = use.cycle, use.within
        elif self._measured[1] is not Pass.BACKWARD:
            self._measured = use.cycle, use.within  # no backward followed
        else:
            self._settled = True
            if available_memory() >= scarce(self._peak, self._peak - self._first):
                keep_freed_blocks()


def of_largest_gradients(plan: Plan) -> int:
    """Return the bytes of host memory that are kept free for backward; 0 if gradients are on a device or none."""
    trained = (layout for layout in plan.units if layout.trainable and plan.update is not None)
    gradients = (slot.numel * layout.dtype.itemsize for layout in trained for slot in layout.slots)
    return _OF_BACKWARD * max(gradients, default=0) if plan.device.host_addressable else 0


def scarce(peak: int, activations: int) -> int:
    """Return the bytes below which memory is short of what freed blocks may take, of bytes without these."""
    return int(min(_FREED_OF_ACTIVATIONS * activations, _FREED_OF_PEAK * peak))


def warning(use: Use, left: int, taken: int, planned: Planned) -> str:
    """Return the text of the warning before `use`.

    left: bytes of host memory. taken: bytes by which the process has grown since its last peak.
    """
    # No estimate of the units to come: some are light and others heavy, and the first ones touch memory for the engine.
    # Readers followed changes that were named here, such as a smaller micro-batch, into processes that were killed.
    held = f"{show_bytes(left)} are left before unit {use.unit}, and the model has just taken {show_bytes(taken)}"
    if use.within is Pass.FORWARD and planned.gradient:
        held += f". The loss and backward take more: the largest gradient alone has {show_bytes(planned.gradient)}"
    return (
        f"host memory: {held}. If memory runs out, the kernel kills the process (exit status 137), or under a ulimit "
        f"an allocation fails. {to_fit(planned.dtype_option)}"
    )


def room() -> tuple[int, int]:
    """Return the bytes that this process has left: as infinity plan counts them, with all pages of its library files,
    and as the limit counts them at present, which may leave out those that other processes have read.
    """
    most = max(0, available_memory() - PROCESS)
    return max(0, min(most, total_memory() - _resident() - PROCESS)), most


def dtype_option(plan: Plan) -> str:
    """Return the option that gives infinity plan the dtype of a Trainer's run, which its config may not have."""
    in_bf16 = any(layout.dtype == torch.bfloat16 for layout in plan.units)
    return " --set bf16.enabled=true" if in_bf16 and _has_transformers() else ""


def plan_command(dtype_option: str) -> str:
    """Return the command that predicts a run in the memory here: a limit, or what other processes leave."""
    # A limit counts this process only, or those that are planned with it. Without one, others keep their memory.
    nbytes = total_memory() if memory_limit()[0] else available_memory() + _resident()
    # A script that imports transformers has its model in a folder or a config, which needs no function.
    folder = "--model FOLDER --batch-size N --seq-length N [--checkpoint-activations]"
    model = folder if _has_transformers() else "--module FILE.py:FUNCTION"
    return f"infinity plan {model} --config FILE{dtype_option} --host-memory {nbytes >> 20}MiB"


def to_fit(dtype_option: str) -> str:
    """Return how to find changes with which a run fits the memory here."""
    command = plan_command(dtype_option)
    return f"{command} (docs/plan.md) simulates a step, and names changes with which it fits, or what it needs."


def _has_transformers() -> bool:
    return "transformers" in sys.modules


def _of_backward(use: Use, planned: Planned) -> int:
    """Return the bytes that the backward of a forward takes beside its activations."""
    return _OF_BACKWARD * planned.gradient if use.within is Pass.FORWARD else 0


def _resident() -> int:
    """Return the resident bytes of this process. getrusage's peak would be the parent's, if that was larger at fork."""
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(file, 128).split()[1]) * resource.getpagesize()
    finally:
        os.close(file)
