"""A training run in several stretches on different ranks. Runs in the processes of a `support.ranks.Group`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infinity.config import Config
from multirank.cases import SAMPLES, global_batches, part
from support.configs import engine_config
from support.loops import open_engine, parameters_of, train
from support.models import Stack, seeded
from support.states import states_of


def stretch(
    rank: int,
    *,
    ranks: int,
    steps: tuple[int, int],
    micro_batches: int,
    folder: str,
    directory: str = "",
    loads: bool = False,
    saves: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train steps [first, stop) of one training, on global batches of `micro_batches` micro-batches in all.

    loads, saves: go on from the checkpoint in `directory`, leave one there. Returns losses and learning rates by step,
    norms, and what is there at the beginning and at the end.
    """
    accumulation = micro_batches // ranks
    config = engine_config(folder=folder, micro=SAMPLES, accumulation=accumulation, **options)
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 20}}}
    config = Config.load({**config.model_dump(exclude_defaults=True), **schedule})
    # Where values are loaded, others are there before.
    model = seeded(lambda: Stack(width=32, depth=3, tied=True), 7 if loads else 0)
    losses, rates, norms = [], [], []
    with open_engine(model, config) as engine:
        client: dict[str, Any] = {}
        if loads:
            client = engine.load_checkpoint(Path(directory))[1]
            assert client == {"next": steps[0]} and engine.global_steps == steps[0]
        begins = parameters_of(engine) | states_of(engine)
        batches = global_batches(steps[1], SAMPLES * micro_batches)[steps[0] :]
        for batch in batches:
            mine = [part(batch, number * ranks + rank) for number in range(accumulation)]
            rates.append(engine.optimizer.param_groups[0]["lr"])
            losses.append(sum(train(engine, mine)) / accumulation)
            norms.append(engine.get_global_grad_norm())
        if saves:
            engine.save_checkpoint(Path(directory), client_state={"next": steps[1]})
        ends = parameters_of(engine) | states_of(engine)
    return {"losses": losses, "rates": rates, "norms": norms, "begins": begins, "ends": ends}
