"""The update of whole parameters by rules in Python. [Note: rules in Python]"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.errors import UpdateError
from infinity.optim.parameter_rule import ParameterHyper, round_master
from infinity.plan.layout import Run, Slot, UnitLayout
from infinity.plan.placement import TileLayout
from infinity.plan.records import Record
from infinity.rules import Hyper


def update_whole(
    layout: UnitLayout,
    tile: TileLayout,
    runs: Sequence[Run],
    hypers: Sequence[Hyper | ParameterHyper],
    param: torch.Tensor,
    records: torch.Tensor,
    grad: torch.Tensor,
    scale: float,
    device: torch.device,
) -> int:
    """Update the parameters of a tile that are in `runs`, one after the other. Returns their number of elements.

    param: the shard's elements, in the unit's dtype. records: the tile's bytes. grad: the tile's elements. scale:
    factor of the gradient. device: computes; tensors in another memory are copied there and back, so that the bits do
    not depend on the tier.
    """
    elements = 0
    for number, first in tile.records.items():
        slot = layout.slots[number]
        start = slot.offset % layout.shard_numel
        run = next((run for run in runs if run.start <= start < run.stop), None)
        # Without a gradient in this step, torch's optimizers leave a parameter and its states alone.
        if run is None:
            continue
        record, hyper = slot.record, hypers[run.group]
        assert record is not None and isinstance(hyper, ParameterHyper)
        mine = _Parameter(slot, record, param[start : start + slot.numel], records[first : first + record.nbytes])
        part = grad[start - tile.tile.start :][: slot.numel].view(slot.shape)
        try:
            mine.update(hyper, run.step - 1, part, scale, device)
        except Exception as error:
            raise UpdateError(
                f"{hyper.rule.name} failed to update {slot.name}, when other parameters of the step may have been "
                f"updated ({type(error).__name__}: {error}). Fix the optimizer, and load the last checkpoint"
            ) from error
        elements += slot.numel
    return elements


class _Parameter:
    """One parameter, and its record, in the memory of their tier."""

    def __init__(self, slot: Slot, record: Record, values: torch.Tensor, memory: torch.Tensor) -> None:
        self._name, self._record, self._memory = slot.name, record, memory
        self._values = values.view(slot.shape)

    def update(
        self, hyper: ParameterHyper, updates: int, grad: torch.Tensor, scale: float, device: torch.device
    ) -> None:
        record, memory = self._record, self._memory.to(device)
        # In fp32, as a plain loop with fp32 masters converts gradients of 16 bits before it scales them.
        gradient = grad.to(device, torch.float32)
        if scale != 1.0:
            # Not in place in a tile: a stored gradient may be read once more.
            gradient = gradient * scale if gradient is grad else gradient.mul_(scale)
        if record.master is None:
            values = self._values.to(device)
            hyper.rule.update(values, gradient, memory, record, updates, hyper.values, self._name)
            if values is not self._values:
                self._values.copy_(values)
        else:
            master = record.master.of(memory)
            hyper.rule.update(master, gradient, memory, record, updates, hyper.values, self._name)
            round_master(master, self._values)
        # On a device that cannot address the tier, the class has worked on a copy.
        if memory is not self._memory:
            self._memory.copy_(memory)
