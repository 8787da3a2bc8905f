"""Cases for groups of ranks: checkpoints of a durable run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from durable.conversion_cases import everything, opened, train
from infinity.checkpoint import committed


def saved(rank: int, *, folder: str, ranks: int, steps: int, durable: bool = True, **options: Any) -> dict[str, Any]:
    """Train and save. Returns all states, and the bytes that the save read through the engine."""
    with opened(folder, ranks, durable=durable, **options) as engine:
        train(engine, range(steps))
        engine.settle()
        before = engine.parts.tiers["nvme"].bytes_read
        engine.save_checkpoint(Path(folder, "saved"), client_state={"steps": steps})
        read = engine.parts.tiers["nvme"].bytes_read - before
        return {"states": everything(engine), "read": read}


def loaded(rank: int, *, folder: str, ranks: int, **options: Any) -> dict[str, Any]:
    """Load in an engine of other initial values. Returns all states."""
    with opened(folder, ranks, seed=9, durable=False, **options) as engine:
        _, client_state = engine.load_checkpoint(Path(folder, "saved"))
        return {"states": everything(engine), "client_state": client_state}


def killed_in_a_save(rank: int, *, folder: str, ranks: int) -> None:
    """Save after each of two steps, and end by SIGKILL in the second save, with a part of the states copied."""
    copied = 0
    clone = committed.clone_range

    def end(*arguments: int) -> None:
        nonlocal copied
        copied += 1
        if copied > 12:
            os.kill(os.getpid(), signal.SIGKILL)
        clone(*arguments)

    committed.clone_range = end
    with opened(folder, ranks) as engine:
        for step in range(2):
            train(engine, range(step, step + 1))
            engine.save_checkpoint(Path(folder, "saved"), client_state={"steps": step + 1})


def failing_on_one_rank(rank: int, *, folder: str, ranks: int) -> tuple[str, list[str], list[float]]:
    """Save while the last rank cannot copy. Returns the error, the files left, and the loss of the step after it."""

    def fail(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    clone = committed.clone_range
    text = ""
    with opened(folder, ranks) as engine:
        train(engine, range(2))
        if rank == ranks - 1:
            committed.clone_range = fail
        try:
            engine.save_checkpoint(Path(folder, "saved"))
        except Exception as error:  # noqa: BLE001 - compared by the test
            text = f"{type(error).__name__}: {error}"
        finally:
            committed.clone_range = clone
        engine.ranks.barrier()  # rank 0 removes the files
        left = sorted(str(path.relative_to(folder)) for path in Path(folder, "saved").rglob("*"))
        return text, left, train(engine, range(2, 3))
