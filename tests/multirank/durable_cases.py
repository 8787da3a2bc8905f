"""Cases of durable runs on several ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from infinity.durable.record import write_record
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError, StorageError, UsageError
from support.configs import engine_config
from support.loops import open_engine
from support.models import VOCABULARY, Stack


def opened(folder: str, **options: Any) -> TrainingEngine:
    torch.manual_seed(0)
    return open_engine(Stack(32, 2), engine_config(folder=folder, **options))


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


def raises(call: Callable[[], object], *texts: str) -> None:
    try:
        call()
    except StorageError as error:
        assert all(text in str(error) for text in texts), str(error)
    else:
        raise AssertionError("a commit was left out without an error")


def committed(engine: TrainingEngine) -> None:
    engine.settle()
    assert engine.updates.durable is not None
    engine.updates.durable.wait()
    dist.barrier()


def copied_while_training(rank: int, folder: str, of: int) -> None:
    """Train four steps; the copy has the files of rank `of` as of step 2, and the rest as of step 4."""
    with opened(folder, durable=True) as engine:
        for stop in (2, 4):
            steps(engine, rank, stop - 2, stop)
            committed(engine)
            if (rank == of) == (stop == 2):
                for path in Path(folder, "run").rglob(f"rank-{rank:05d}.*"):
                    target = Path(folder, "copy", path.relative_to(Path(folder, "run")))
                    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    shutil.copy2(path, target)
            dist.barrier()


def refused(rank: int, folder: str, run: str) -> str:
    """Return the error of a resume, which leaves the engine as it was."""
    try:
        with opened(folder, durable=True, run=run) as engine:
            engine.resume()
    except CheckpointError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def without_files(rank: int, folder: str, lost: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The states of rank `lost` are unlinked after step 2: all ranks raise in step 4, save, and go on elsewhere."""
    engine = opened(folder, durable=True)
    losses = steps(engine, rank, 0, 2)
    committed(engine)
    if rank == lost:
        Path(folder, "run", "0001", f"rank-{rank:05d}.states").unlink()
    losses += steps(engine, rank, 2, 3)
    cause = "was removed while the run trained" if rank == lost else "files of another rank"
    raises(lambda: steps(engine, rank, 3, 4), "step 3 was not committed", cause)
    committed(engine)
    engine.save_checkpoint(Path(folder, "saved"), client_state={"next": 4})
    raises(engine.close, "step 4 was not committed", cause)
    with opened(folder, durable=True, run="next") as engine:
        engine.load_checkpoint(Path(folder, "saved"))
        return [*losses, *steps(engine, rank, 4, 6)], engine.state_dict()


def back_after_a_while(rank: int, folder: str, lost: int) -> None:
    """The files of rank `lost` are away during the commits of steps 3 and 4, and back for that of step 5."""
    path = Path(folder, "run", "0001", f"rank-{rank:05d}.states")
    engine = opened(folder, durable=True)
    steps(engine, rank, 0, 2)
    committed(engine)
    if rank == lost:
        path.rename(path.with_suffix(".away"))
    dist.barrier()
    steps(engine, rank, 2, 3)
    for number in (3, 4):
        raises(lambda: steps(engine, rank, number, number + 1), f"step {number} was not committed")  # noqa: B023
        committed(engine)
        assert [each.name for each in path.parent.glob(f"rank-{rank:05d}.record-*")], "the former record stays"
        if number == 3 and rank == lost:
            path.with_suffix(".away").rename(path)
        dist.barrier()
    engine.close()
