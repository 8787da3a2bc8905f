"""Cases of durable runs on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from infinity.durable.record import write_record
from infinity.engine.training import TrainingEngine
from infinity.errors import StorageError, UsageError
from support.configs import engine_config
from support.loops import open_engine
from support.models import VOCABULARY, Stack


def opened(folder: str, **options: Any) -> TrainingEngine:
    torch.manual_seed(0)
    return open_engine(Stack(32, 4), engine_config(folder=folder, **options))


def steps(engine: TrainingEngine, rank: int, first: int, stop: int) -> list[float]:
    losses = []
    for number in range(first, stop):
        generator = torch.Generator().manual_seed(10 * number + rank)
        tokens = torch.randint(VOCABULARY, (4, 9), generator=generator)
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step(client_state={"next": number + 1, "rank": rank})
        losses.append(loss.item())
    return losses


def uninterrupted(rank: int, folder: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    with opened(folder, **options) as engine:
        return steps(engine, rank, 0, 6), engine.state_dict()


def begun(rank: int, folder: str, stop: int, **options: Any) -> list[float]:
    with opened(folder, durable=True, **options) as engine:
        return steps(engine, rank, 0, stop)


def gone_on(rank: int, folder: str, **options: Any) -> tuple[int, list[float], dict[str, torch.Tensor]]:
    with opened(folder, durable=True, **options) as engine:
        state = engine.resume()
        assert state is not None and state["rank"] == rank
        return state["next"], steps(engine, rank, state["next"], 6), engine.state_dict()


def begun_and_left_behind(rank: int, folder: str, stop: int, **options: Any) -> list[float]:
    """Rank 1 ends before it writes the record of the last step."""
    import infinity.durable.run as module

    def write(path: Path, record: Any) -> None:
        if rank == 1 and record.number == stop:
            raise OSError(5, "Input/output error")
        write_record(path, record)

    kept: Callable[..., None] = module.write_record
    module.write_record = write
    engine = opened(folder, durable=True, **options)
    losses = steps(engine, rank, 0, stop)
    try:
        engine.close()
    except StorageError as error:
        assert (str(error).count("another rank") > 0) == (rank == 0), str(error)
        assert f"step {stop} could not be committed" in str(error)
        assert f"last committed step is {stop - 1}" in str(error), str(error)
        return losses
    finally:
        module.write_record = kept
    raise AssertionError("no rank raised")


def refused_without_resume(rank: int, folder: str) -> None:
    with opened(folder, durable=True) as engine:
        try:
            steps(engine, rank, 0, 1)
        except UsageError as error:
            assert "engine.resume()" in str(error)
        else:
            raise AssertionError("the run was replaced")
    dist.barrier()
