"""Cases for the processes of a `support.ranks.Group`: whole models in `GatheredParameters`."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from typing import Any

import torch

import infinity
import infinity.deepspeed as deepspeed
from infinity.engine.training import TrainingEngine
from infinity.errors import OutOfMemoryError, RanksError
from infinity.plan.pools import UNITS
from infinity.tiers.available import MACHINE_MEMORY
from multirank.cases import SAMPLES, device_of
from support.configs import engine_config
from support.loops import open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches


def many(rank: int, folder: str, late: bool, **options: Any) -> TrainingEngine:
    config = engine_config(folder=folder, micro=SAMPLES, unit_size=2048, prefetch_bytes=0, **options)
    engine = open_engine(seeded(lambda: Stack(depth=5)), config, device_of(rank, late))
    assert len(engine.units) == 17
    return engine


def whole(rank: int, *, folder: str, late: bool, gathers: bool, **options: Any) -> dict[str, Any]:
    """Train, let rank 1 edit every parameter, and train with views of some alive, in a gathered model if `gathers`."""
    warnings.filterwarnings("ignore", "something still refers to the parameters")
    batches = token_batches(6, batch=SAMPLES, seed=rank)
    with many(rank, folder, late, **options) as engine:
        planned = engine.parts.pools[UNITS].nbytes
        parameters = list(engine.module.parameters())
        losses = train(engine, batches[:2])
        for part in [parameters] if gathers else [[parameter] for parameter in parameters]:
            with infinity.GatheredParameters(part, modifier_rank=1), torch.no_grad():
                for parameter in part if rank == 1 else []:
                    parameter.mul_(0.75)
        with infinity.GatheredParameters(parameters if gathers else []):
            views = [engine.module.blocks[number].up.weight[0] for number in (0, 2, 4)] if gathers else []
            losses += train(engine, batches[2:4])
            del views
        losses += train(engine, batches[4:])
        added = engine.parts.pools[UNITS].nbytes - planned
        return {"losses": losses, "values": parameters_of(engine), "added": added}


def too_large(rank: int, *, folder: str) -> dict[str, Any]:
    """Gather a model where rank 1 has no memory left, then where it has, and train."""
    with many(rank, folder, late=False) as engine:
        if rank == 1:
            os.environ[MACHINE_MEMORY] = "1MiB"
        try:
            with infinity.GatheredParameters(engine.module.parameters()):
                raised = ""
        except OutOfMemoryError as error:
            raised = str(error)
        finally:
            os.environ.pop(MACHINE_MEMORY, None)
        with infinity.GatheredParameters(engine.module.parameters()):
            pass
        return {"raised": raised, "losses": train(engine, token_batches(2, batch=SAMPLES))}


def raising(rank: int, *, folder: str, raises: bool, **options: Any) -> dict[str, torch.Tensor]:
    """Let rank 1 edit every parameter in a block that ends with an exception on all ranks if `raises`."""
    with many(rank, folder, late=False, **options) as engine:
        with suppress(ValueError), infinity.GatheredParameters(engine.module.parameters(), modifier_rank=1):
            for parameter in engine.module.parameters() if rank == 1 else ():
                parameter.data.mul_(2)
            if raises:
                raise ValueError
        train(engine, token_batches(1, batch=SAMPLES, seed=rank))
        return parameters_of(engine)


def raising_alone(rank: int, *, folder: str) -> tuple[str, str]:
    """Raise on rank 1 in a block in which rank 0 goes on; return the type and text of this rank's error."""
    engine = many(rank, folder, late=False)
    try:
        with infinity.GatheredParameters(engine.module.head.weight, modifier_rank=0):
            if rank == 1:
                raise ValueError("no such file")
            engine(*token_batches(1, batch=SAMPLES)[0])
    except (ValueError, RanksError) as error:
        return type(error).__name__, str(error)
    return "", ""


def within(rank: int, *, folder: str) -> dict[str, torch.Tensor]:
    """Edit every parameter on rank 1, and on all ranks in a block of `infinity.deepspeed` inside."""
    with many(rank, folder, late=False) as engine:
        parameters = list(engine.module.parameters())
        with infinity.GatheredParameters(parameters, modifier_rank=1):
            for parameter in parameters if rank == 1 else ():
                parameter.data.fill_(2)
            with deepspeed.zero.GatheredParameters(parameters):
                for parameter in parameters:
                    parameter.data.add_(1)
        return parameters_of(engine)
