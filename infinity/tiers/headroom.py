"""Spares the last host memory of a process, and warns before it is taken [Note: memory that no plan counts].

A plan counts no activations, since they depend on the batch. A process that exceeds the memory of its container is
killed without a message.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from enum import Enum

from infinity.concurrency import now
from infinity.observe.log import logger
from infinity.plan.plan import Plan
from infinity.plan.pools import GRADIENT_SHARDS, GRADIENTS, GRADIENTS_TO_REDUCE, UNITS
from infinity.sizes import format_size, show_bytes
from infinity.tier_kind import TierKind
from infinity.tiers.available import available_memory
from infinity.tiers.freed import keep_freed_blocks, return_freed_blocks, return_freed_memory

_INTERVAL = 0.005
"""Seconds between two looks, each of which takes 6 microseconds: small units take less, and no memory to speak of."""
_GROWN = 4 << 20
"""Bytes by which the process's peak grows before what is left is looked at, which takes a quarter of a millisecond."""
_LEAST = 16 << 20
"""Bytes below which the next allocation of any kind may fail."""
_FREED_OF_ACTIVATIONS, _FREED_OF_PEAK = 2, 0.5
"""Shares that glibc keeps in freed blocks at most: 1.8 times the activations and 0.39 of the peak were measured."""
_SHRINKS = 3
"""Divisor of the buffers' bytes: halved units free 0.37 to 0.82 of them, as their largest parameters do not shrink."""
_OF_BACKWARD = 2
"""Gradients of the largest parameter that are kept free for the loss and backward: a tied embedding has three at once,
and the loss of a language model takes a few copies of its logits."""
PROCESS = 32 << 20
"""Bytes of host memory that a process takes beside the plan until its second step, without activations: threads,
libraries that forward and backward load, Python's objects. 25 MB were measured with a small GPT-2 and torch 2.13."""
_SEVERAL = 300_000_000
"""Bytes of activations from which files are advised, which need buffers of their own and 256 MiB of the drive."""


class Pass(Enum):
    """Pass of the model in which a unit is used."""

    FORWARD = "keeps activations for a backward"
    WITHOUT_GRAPH = "keeps none: evaluation, or a block that a reentrant checkpoint runs again"
    BACKWARD = "frees them, and computes those again that checkpoints dropped"


@dataclass(frozen=True)
class Use:
    """A use of a unit. cycle: number of the forward and its backward. done: units used before in this cycle."""

    unit: str
    cycle: int
    done: int
    within: Pass


@dataclass(frozen=True)
class Planned:
    """Numbers of a plan on which advice depends.

    units: of the model. largest: bytes of the largest unit, if a lower infinity.unit_size divides it; else 0.
    buffers: bytes of host memory for units and their gradients. saves_on_nvme: activations are written to nvme.
    gradient: bytes of the largest parameter's gradient, which autograd allocates in host memory; 0: it allocates none.
    """

    units: int = 1
    largest: int = 0
    buffers: int = 0
    saves_on_nvme: bool = False
    gradient: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Planned:
        largest = max(plan.units, key=lambda layout: layout.nbytes)
        has_parts = 2 * max(slot.numel for slot in largest.slots) <= largest.numel
        # Others, such as tiles of optimizer states, have their size from other keys.
        pools = (UNITS, GRADIENTS, GRADIENTS_TO_REDUCE, GRADIENT_SHARDS)
        held = (pool.nbytes for pool in plan.pools if pool.name in pools and plan.in_host_memory(pool.tier))
        saves_on_nvme = plan.activations is not None and plan.activations.tier is TierKind.NVME
        gradient = of_largest_gradients(plan) // _OF_BACKWARD
        return cls(len(plan.units), largest.nbytes if has_parts else 0, sum(held), saves_on_nvme, gradient)


class Headroom:
    """Returns freed blocks to the system while memory is short, and logs one warning if less is left than the model has
    taken since the last look [Note: freed blocks].
    """

    def __init__(self, planned: Planned | None = None, *, watches: bool = True) -> None:
        self._planned = planned or Planned()
        self._watches = watches
        self._warned = False
        self._looked = 0.0
        self._first = self._peak = -1
        """Resident bytes at the first use of a unit, and the most at any; -1: none yet. Until the first use, a script
        may load its data."""
        self._base = -1, 0, 0
        """(cycle, units done, resident bytes) from which the units of a forward are measured."""
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
        more = self._to_come(use, resident)
        cycle, done, _ = self._base
        # Blocks freed before are reused up to the peak. The first unit is unlike the others: an embedding saves only
        # indices, and a first call imports modules.
        if cycle != use.cycle or not done or grown <= 0:
            self._base = use.cycle, use.done, resident
        if grown < _GROWN:
            return
        self._peak = resident
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
        logger.warning("%s", warning(use, left, grown, more, self._planned))

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

    def _to_come(self, use: Use, resident: int) -> int | None:
        """Return the bytes that the units left in a forward take, if each takes as much as those before did."""
        cycle, done, before = self._base
        units = self._planned.units
        if (
            not _keeps(use, self._planned)
            or use.cycle != cycle
            or not 0 < done < use.done < units
            or resident <= before
        ):
            return None
        return (resident - before) * (units - use.done) // (use.done - done)


def of_largest_gradients(plan: Plan) -> int:
    """Return the bytes of host memory that are kept free for backward; 0 if gradients are on a device or none."""
    trained = (layout for layout in plan.units if layout.trainable and plan.update is not None)
    gradients = (slot.numel * layout.dtype.itemsize for layout in trained for slot in layout.slots)
    return _OF_BACKWARD * max(gradients, default=0) if plan.device.host_addressable else 0


def scarce(peak: int, activations: int) -> int:
    """Return the bytes below which memory is short of what freed blocks may take, of bytes without these."""
    return int(min(_FREED_OF_ACTIVATIONS * activations, _FREED_OF_PEAK * peak))


def warning(use: Use, left: int, grown: int, more: int | None, planned: Planned) -> str:
    """Return the text of the warning before `use`.

    left: bytes of host memory. grown: bytes taken since the last look. more: estimated bytes that the units from this
    one on take; None: unknown.
    """
    taken = show_bytes(grown)
    if more is not None:
        count = planned.units - use.done
        units = "the last unit takes" if count == 1 else f"the {count} units left take"
        taken += f", mostly activations, and needs about {_rounded(more)} more if {units} as much as those before"
    if use.within is Pass.FORWARD and planned.gradient:
        taken += f". The loss and backward take more: the largest gradient alone has {show_bytes(planned.gradient)}"
    *others, last = _remedies(use, grown, more, planned)
    remedies = f"{', '.join(others)} or {last}"
    return (
        f"host memory: {show_bytes(left)} are left before unit {use.unit}. The model has just taken {taken}. If memory "
        "runs out, the kernel kills the process (exit status 137), or under a ulimit an allocation fails. "
        f"{remedies}. infinity plan counts all of it, and advises what suffices."
    )


def _keeps(use: Use, planned: Planned) -> bool:
    """Return whether each unit adds activations to host memory. On nvme, their buffers are filled once."""
    return use.within is Pass.FORWARD and not planned.saves_on_nvme


def _of_backward(use: Use, planned: Planned) -> int:
    """Return the bytes that the backward of a forward takes beside its activations."""
    return _OF_BACKWARD * planned.gradient if use.within is Pass.FORWARD else 0


def _remedies(use: Use, grown: int, more: int | None, planned: Planned) -> list[str]:
    """Return changes, the most effective first. Arguments: as of `warning`."""
    found = ["Lower the micro-batch", "shorten the sequences"]
    has_graph = use.within is not Pass.WITHOUT_GRAPH
    if has_graph:
        found.append("checkpoint activations (torch.utils.checkpoint)")
    # The loss and backward follow a forward. Other passes need about as much again, and no more for each unit.
    short = (None if more is None else 2 * more) if _keeps(use, planned) else grown
    short = None if short is None else short + _of_backward(use, planned)
    if planned.largest and short is not None and short <= planned.buffers // _SHRINKS:
        half = format_size(1 << max(12, (planned.largest // 2).bit_length() - 1))
        largest = show_bytes(planned.largest)
        found.append(f'set infinity.unit_size to "{half}" for smaller buffers (the largest unit has {largest})')
    if has_graph and not planned.saves_on_nvme and (more is None or more >= _SEVERAL):
        when = "if activations take several hundred MB, " if more is None else ""
        found.append(f'{when}set infinity.activations.device to "nvme"')
    return found


def _rounded(nbytes: int) -> str:
    """Return an estimate in two digits: 508_000_000 -> '510 MB'."""
    return show_bytes(float(f"{nbytes:.1e}")).replace(".00", "")


def _resident() -> int:
    """Return the resident bytes of this process. getrusage's peak would be the parent's, if that was larger at fork."""
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(file, 128).split()[1]) * resource.getpagesize()
    finally:
        os.close(file)
