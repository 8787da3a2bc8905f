"""Cases for the processes of a `support.ranks.Group`: `infinity.stream_weights`."""

from __future__ import annotations

import gc
from typing import Any

import torch

import infinity
from infinity.engine.training import TrainingEngine
from infinity.errors import RanksError, UsageError
from multirank.cases import SAMPLES, device_of
from support.configs import engine_config
from support.loops import open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches


def many(rank: int, folder: str, late: bool = False, **options: Any) -> TrainingEngine:
    config = engine_config(folder=folder, micro=SAMPLES, unit_size=2048, prefetch_bytes=0, **options)
    return open_engine(seeded(lambda: Stack(depth=5, tied=True)), config, device_of(rank, late))


def streaming(rank: int, *, folder: str, late: bool, inference: bool = False, **options: Any) -> dict[str, Any]:
    """Train, and stream after each step. Returns losses with and without streams, and whether values are equal."""
    batches = token_batches(4, batch=SAMPLES, seed=rank)
    plain = many(rank, folder, late, **options)
    expected = train(plain, batches)
    plain.close()
    losses, equal = [], True
    with many(rank, folder, late, **options) as engine:
        for batch in batches:
            losses += train(engine, [batch])
            values = dict(infinity.stream_weights(engine))
            equal &= values["head.weight"] is values["embedding.weight"]
            equal &= all(torch.equal(values[name], value) for name, value in parameters_of(engine).items())
        state = {name: value.cpu() for name, value in values.items()}
    if inference:
        model = seeded(lambda: Stack(depth=5, tied=True), 1)
        model.load_state_dict(state)
        with infinity.init_inference(model, engine_config(folder=folder, unit_size=2048)) as engine:
            equal &= all(torch.equal(state[name], value) for name, value in infinity.stream_weights(engine))
    return {"losses": losses, "expected": expected, "equal": equal, "state": state}


def stopping(rank: int, *, folder: str, how: str, at: tuple[int, int], **options: Any) -> dict[str, Any]:
    """Stop at tensor `at[rank]` of a stream, then train and stream all. Returns what was raised, and the losses."""
    batches = token_batches(2, batch=SAMPLES, seed=rank)
    with many(rank, folder, **options) as engine:
        losses, raised, count = train(engine, batches[:1]), "", 0
        try:
            if how == "abandon":  # the collector closes the stream, or the next call
                stream = infinity.stream_weights(engine)
                for _ in range(at[rank]):
                    next(stream)
                    count += 1
                cycle: list[Any] = [stream]
                cycle.append(cycle)
                del stream, cycle
                if rank == 0:
                    gc.collect()
            else:
                for _ in infinity.stream_weights(engine):
                    count += 1
                    if count == at[rank] and how == "raise":
                        raise ValueError("no room")
                    if count == at[rank]:
                        break
        except (RanksError, ValueError) as error:
            raised = f"{type(error).__name__}: {error}"
        losses += train(engine, batches[1:])
        values = dict(infinity.stream_weights(engine))
        return {"raised": raised, "count": count, "losses": losses, "values": values}


def differing(rank: int, *, folder: str, **options: Any) -> dict[str, Any]:
    """Pass arguments that differ between ranks, then equal ones."""
    calls: list[dict[str, Any]] = [
        {"names": ["head.weight"] if rank else ["blocks.0.up.weight"]},
        {"dtype": torch.float16 if rank else None},
        {"names": ["head.weight", "wrong"] if rank else ["head.weight"]},
        {"names": ["wrong"]},
    ]
    with many(rank, folder, **options) as engine:
        raised = []
        for arguments in calls:
            try:
                raised.append(str(len(dict(infinity.stream_weights(engine, **arguments)))))
            except (RanksError, UsageError) as error:
                raised.append(f"{type(error).__name__}: {error}")
        train(engine, token_batches(1, batch=SAMPLES, seed=rank))
        return {"raised": raised, "count": len(dict(infinity.stream_weights(engine)))}


def calling(rank: int, *, folder: str) -> str:
    """Stream on rank 0 only, while rank 1 saves."""
    engine = many(rank, folder)
    try:
        if rank:
            engine.state_dict()
        else:
            dict(infinity.stream_weights(engine))
    except RanksError as error:
        return str(error)
    return ""
