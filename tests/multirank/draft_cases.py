"""Cases for the processes of a `support.ranks.Group`: updates that are drafts until the norm is known."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

import infinity
from infinity.engine.training import TrainingEngine
from infinity.schedule import speculation
from multirank.cases import SAMPLES, device_of
from multirank.updated_cases import Holding
from support.configs import engine_config
from support.loops import open_engine, parameters_of
from support.models import seeded, vector_batches
from support.states import states_of

STEPS = 8


def training(
    rank: int,
    *,
    late: bool,
    folder: str,
    scaled: Sequence[int] = (),
    holds: str = "nothing",
    between: str = "",
    accumulation: int = 1,
    param: str = "nvme",
    optim: str = "nvme",
    **options: Any,
) -> dict[str, Any]:
    """Train with clipping, which scales the gradients of the steps `scaled`. holds: more that rank 0 refers to
    (`Holding`). between: what happens before `step()`: "read" or "edit".

    Returns losses, norms, final values and states, and the drafts made and kept, step by step.
    """
    speculation.PATIENCE = 1
    memory = {"memory": {"host": "64MiB"}} if optim == "cpu" else {}
    config = engine_config(
        param,
        optim,
        folder=folder,
        micro=SAMPLES,
        clip=1.0,
        unit_size=4096,
        accumulation=accumulation,
        prefetch_bytes=8192,
        **memory,
        **options,
    )
    model = seeded(lambda: Holding(holds if rank == 0 else "nothing"))
    drafts: list[tuple[int, int]] = []
    warnings.filterwarnings("ignore", "something still refers")
    with open_engine(model, config, device_of(rank, late)) as engine:
        _count(engine, drafts)
        losses: list[float] = []
        for number, batch in enumerate(vector_batches(STEPS * accumulation, batch=SAMPLES, seed=rank)):
            step = number // accumulation
            loss = engine(*batch) * (1e3 if step in scaled else 1e-3)
            engine.backward(loss)
            losses.append(loss.item())
            del loss
            if (number + 1) % accumulation == 0 and step in (4, 5):
                _between(engine, between)
            engine.step()
            losses.append(engine.grad_norm or 0.0)
        values = parameters_of(engine) | states_of(engine)
    warnings.filterwarnings("error", "something still refers to the parameters of unit", UserWarning)
    return {"losses": losses, "values": values, "drafts": drafts}


def _count(engine: TrainingEngine, drafts: list[tuple[int, int]]) -> None:
    runner = engine.updates.runner
    decide = runner._decide

    def counted(scale: float) -> list[int]:
        made = len(runner._drafts)
        kept = decide(scale)
        drafts.append((made, len(kept)))
        return kept

    runner._decide = counted  # type: ignore[method-assign]


def _between(engine: TrainingEngine, what: str) -> None:
    weight = engine.module.layers[2].weight
    if what == "read":
        for layer in engine.module.layers:
            layer.weight.norm().item()
    elif what == "edit":
        with torch.no_grad(), infinity.GatheredParameters([weight], modifier_rank=0):
            weight.mul_(0.5)
