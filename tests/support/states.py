"""Optimizer states, read from their tier: the same names and tensors for every tier, tile size and unit size."""

from __future__ import annotations

import torch

from infinity.checkpoint.format import view
from infinity.engine.training import TrainingEngine


def states_of(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    """Return "parameter/state" → master and moments in their stored format, after pending updates."""
    engine.settle()
    found: dict[str, torch.Tensor] = {}
    for unit in engine.units:
        flats = engine.parts.states.read(unit.layout)
        for kind in engine.parts.states.kinds(unit.layout):
            for slot in unit.layout.slots:
                found[f"{slot.name}/{kind.name}"] = view(kind, slot, flats[kind.name]).clone()
    return found
