"""Steps that each train other parameters. This function runs in the processes of a `support.ranks.Group`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.changing import Changing, Uses, prepare, tokens_of
from support.configs import engine_config
from support.loops import open_engine, parameters_of
from support.models import seeded


def changed(rank: int, ranks: int, steps: Sequence[Uses], **options: Any) -> dict[str, Any]:
    """Train on this rank's part of each batch. Returns the losses and the final parameters."""
    losses = []
    with open_engine(seeded(Changing), engine_config(lr=1e-2, unit_size=400, **options)) as engine:
        for number, uses in enumerate(steps, 1):
            prepare(engine.module, uses)
            loss = engine(tokens_of(number).chunk(ranks)[rank], uses)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return {"losses": losses, "parameters": parameters_of(engine)}
