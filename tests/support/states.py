"""What the optimizer keeps, read from its tier: the same names and tensors whatever the tier, tiles and units."""

from __future__ import annotations

import torch

from infinity.engine import Engine


def states_of(engine: Engine) -> dict[str, torch.Tensor]:
    """ "parameter/state" → values of `master`, `exp_avg` and `exp_avg_sq`. Updates that are due are done first."""
    engine.settle()
    found: dict[str, torch.Tensor] = {}
    for unit in engine.units:
        for state, flat in engine.parts.states.read(unit.layout).items():
            for slot in unit.layout.slots:
                found[f"{slot.name}/{state}"] = flat[slot.offset : slot.stop].view(slot.shape).clone()
    return found
