"""Optimizer states, read from their tier: the same names and tensors for every tier, tile size and unit size."""

from __future__ import annotations

import torch

from infinity.engine.training import TrainingEngine


def states_of(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    """Return "parameter/state" → master and moments in their stored format, after pending updates."""
    engine.settle()
    found: dict[str, torch.Tensor] = {}
    for unit in engine.units:
        flats = engine.parts.states.read(unit.layout)
        for number, slot in enumerate(unit.layout.slots):
            values = engine.parts.states.of_slot(unit.layout, flats, number, unit.steps[number])
            found |= {f"{slot.name}/{name}": value.clone() for name, value in values.items()}
    return found
