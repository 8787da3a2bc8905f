"""Code of ranks that train a model with tiled layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import infinity
from infinity.nn import tile
from multirank.cases import SAMPLES
from support.configs import engine_config
from support.loops import open_engine, train
from support.models import Stack, seeded, token_batches
from support.states import states_of


def model(max_bytes: int) -> Stack:
    """max_bytes: of a tile; 0: no tiles."""
    made = seeded(lambda: Stack(depth=1))
    if max_bytes:
        tile(made, max_bytes)
    return made


def resumed(rank: int, *, folder: str, source: Path | None, max_bytes: int, target: Path, **options: Any) -> Any:
    """Load `source`, save it in `target` and train. Return the losses and the state dict before."""
    config = engine_config(folder=folder, micro=SAMPLES, unit_size=2048, **options)
    batches = token_batches(3, batch=SAMPLES, seed=rank)
    with open_engine(model(max_bytes), config) as engine:
        if source is None:
            train(engine, batches[:2])
        else:
            engine.load_checkpoint(source)
        engine.save_checkpoint(target, background=True)
        states = engine.state_dict()
        losses = train(engine, batches[2:])
        assert infinity.get_full_fp32_param(next(engine.module.parameters())) is not None
        return losses, states, len(states_of(engine))
