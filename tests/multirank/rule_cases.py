"""Code of the ranks in test_rules_in_python.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import infinity
from multirank.cases import SAMPLES, device_of, global_batches, part
from support.configs import engine_config
from support.loops import parameters_of, train
from support.models import Stack, seeded
from support.rules import OPTIMIZERS
from support.states import states_of


def stack() -> Stack:
    return seeded(lambda: Stack(width=32, depth=3))


def training(
    rank: int,
    *,
    ranks: int,
    steps: int,
    folder: str,
    kind: str,
    late: bool = False,
    saved: str = "",
    load: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Train on this rank's part of every global batch, or alone with the ranks' parts as micro-batches.

    saved, load: folders of a checkpoint that is written at the end, and loaded at the start.
    """
    alone = ranks == 1
    count = 1 if not alone else 2
    config = engine_config(folder=folder, micro=SAMPLES, accumulation=count, **options)
    model = stack()
    engine = infinity.initialize(model, config, optimizer=OPTIMIZERS[kind](model), device=device_of(rank, late))[0]
    with engine:
        if load:
            engine.load_checkpoint(load)
        losses = []
        for batch in global_batches(steps, 2 * SAMPLES):
            mine = [part(batch, 0), part(batch, 1)] if alone else [part(batch, rank)]
            losses.append(sum(train(engine, mine)) / count)
        if saved:
            engine.save_checkpoint(Path(saved))
        layouts = [unit.layout for unit in engine.units]
        state = engine.optimizer.state_dict()
        return {
            "losses": losses,
            "values": parameters_of(engine) | states_of(engine),
            "padded": sum(layout.numel for layout in layouts),
            "elements": sum(layout.parameter_numel for layout in layouts),
            "owned": sum(
                slot.numel
                for layout in layouts
                for slot in layout.slots
                if slot.offset // layout.shard_numel == engine.ranks.shard_rank
            ),
            "gathered": engine.ranks.traffic.all_gather_bytes,
            "reduced": engine.ranks.traffic.reduce_scatter_bytes,
            "states": {number: sorted(each) for number, each in state["state"].items()},
        }
