"""Code of ranks that train while a checkpoint is written in the background."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import infinity
from infinity.errors import CheckpointError, RanksError
from infinity.tiers.device import CpuDevice
from multirank.cases import SAMPLES, device_of
from support.configs import engine_config
from support.late_disk import use_late_disks
from support.loops import open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches
from support.paced_save import Pace
from support.states import states_of


def saved(rank: int, *, folder: str, directory: str, how: str, late: bool = False, **options: Any) -> dict[str, Any]:
    """Train 2 steps, save ("", "foreground" or "background"), train 2; losses, what is there at the end, and the units
    that had to be waited for.
    """
    random.seed(0)
    config = engine_config(folder=folder, micro=SAMPLES, **options)
    batches = token_batches(4, batch=SAMPLES, seed=rank)
    with pytest.MonkeyPatch.context() as patch:
        if late:
            use_late_disks(patch)
        pace = Pace(patch)
        with open_engine(seeded(lambda: Stack(depth=3)), config, device_of(rank, late)) as engine:
            losses = train(engine, batches[:2])
            if how:
                engine.save_checkpoint(Path(directory), "a", background=how == "background")
            losses += train(engine, batches[2:])
            values = parameters_of(engine) | states_of(engine)
        waited = list(dict.fromkeys(pace.waited))
        return {"losses": losses, "values": values, "waited": waited, "saved": pace.saved, "overdue": pace.overdue}


def stack() -> Stack:
    return Stack(depth=2)


def closed_at_once(rank: int, *, folder: str, directory: str, background: list[bool]) -> list[str]:
    """Return the saved files after several saves and an immediate close."""
    with open_engine(seeded(stack), engine_config(folder=folder, micro=SAMPLES)) as engine:
        for number, beside in enumerate(background):
            train(engine, token_batches(1, batch=SAMPLES, seed=rank))
            engine.save_checkpoint(Path(directory), f"save {number}", background=beside)
    return sorted(path.name for path in Path(directory).iterdir())


def without_space(rank: int, *, folder: str, directory: str, where: str) -> dict[str, Any]:
    """Save to a disk that is too small; return each rank's errors, their places and number, and the later losses."""
    told = []
    batches = token_batches(6, batch=SAMPLES, seed=rank)
    with open_engine(seeded(Stack), engine_config(folder=folder, micro=SAMPLES)) as engine:
        losses = train(engine, batches[:1])
        engine.save_checkpoint(Path(directory), "b", background=True)
        assert engine.saving is not None
        if where == "wait on one" and rank == 0:
            with pytest.raises(CheckpointError):
                engine.saving.wait()
        if where == "wait":
            try:
                engine.saving.wait()
            except CheckpointError as error:
                told.append(f"wait: {error}")
        for number, batch in enumerate(batches[1:]):
            while where == "step" and number == rank and not engine.saving.done():
                time.sleep(0.01)  # the ranks come to know in different steps
            try:
                losses += train(engine, [batch])
            except CheckpointError as error:
                losses.append(0.0)
                told.append(f"step {engine.global_steps}: {error}")
        try:
            engine.save_checkpoint(Path(directory), "c", background=True)
        except CheckpointError as error:
            told.append(f"save: {error}")
        steps, values = engine.global_steps, states_of(engine)
        if engine.saving.path.name == "c":
            with pytest.raises(CheckpointError):
                engine.saving.wait()
    return {"told": told, "losses": losses, "values": values, "steps": steps}


def undisturbed(rank: int, *, folder: str) -> dict[str, Any]:
    """Return the results that `without_space` must reproduce."""
    with open_engine(seeded(Stack), engine_config(folder=folder, micro=SAMPLES)) as engine:
        losses = train(engine, token_batches(6, batch=SAMPLES, seed=rank))
        return {"losses": losses, "values": states_of(engine)}


def killed(rank: int, *, folder: str, directory: str) -> None:
    """Kill rank 1 in the middle of a save; rank 0 writes its error and the remaining files."""
    with pytest.MonkeyPatch.context() as patch:
        pace = Pace(patch)
        engine = open_engine(seeded(stack), engine_config(folder=folder, micro=SAMPLES))
        train(engine, token_batches(1, batch=SAMPLES, seed=rank))
        engine.save_checkpoint(Path(directory), "a")
        engine.save_checkpoint(Path(directory), "b", background=True)
        assert engine.saving is not None
        held = Path(folder, "held")
        if rank == 1:
            while not held.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        assert pace.held.wait(60)
        held.touch()
        time.sleep(0.5)
        pace.free()
        try:
            engine.saving.wait()
            said = "nothing"
        except CheckpointError as error:
            said = str(error)
        left = sorted(path.name for path in Path(directory).iterdir())
        Path(directory, "said").write_text(f"{said}\n{left}")
        os._exit(0)


def collected_in_an_exchange(rank: int, *, folder: str) -> list[str]:
    """The collector finds the engine in an exchange of its background save. Returns the engine's threads after that."""
    before = set(threading.enumerate())
    box = [open_engine(seeded(stack), engine_config(folder=folder, micro=SAMPLES))]
    train(box[0], token_batches(1, batch=SAMPLES))
    all_gather, dropped = dist.all_gather, threading.Event()

    def dropping(*given: Any, **options: Any) -> Any:
        if box and dropped.is_set() and threading.current_thread().name == "infinity-side":
            box.clear()
            gc.collect()
        return all_gather(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        pace = Pace(patch)
        patch.setattr(dist, "all_gather", dropping)
        box[0].save_checkpoint(Path(folder, "saved"), "a", background=True)
        saving = box[0].saving
        assert saving is not None and pace.held.wait(60)
        dropped.set()
        pace.free()
        saving.wait()
    assert not box
    left = [each for each in threading.enumerate() if each not in before and each.name.startswith("infinity-")]
    for thread in left:
        thread.join(10)
    return [thread.name for thread in left if thread.is_alive()]


def of_two_minds(rank: int, *, folder: str, directory: str) -> str:
    with open_engine(seeded(stack), engine_config(folder=folder, micro=SAMPLES)) as engine:
        try:
            engine.save_checkpoint(Path(directory), "a", background=rank == 0)
        except RanksError as error:
            return str(error)
        return ""


def of_several_minds(
    rank: int, *, folder: str, saves: list[list[Any]], loads: list[list[Any]], infer: bool = False
) -> list[str]:
    """Return this rank's results or errors of a save and two loads with its own arguments, after a correct save."""
    told = []
    config = engine_config(folder=folder, micro=SAMPLES)
    with open_engine(seeded(stack), config) as engine:
        engine.save_checkpoint(Path(folder, "saved"), "right")
        for call, arguments in ((engine.save_checkpoint, saves), (engine.load_checkpoint, loads)):
            try:
                told.append(f"returned {call(*arguments[rank])}")
            except RanksError as error:
                told.append(str(error))
        losses = train(engine, token_batches(2, batch=SAMPLES, seed=rank))
        engine.save_checkpoint(Path(folder, "saved"), "after")
        assert len(losses) == 2
    with infinity.init_inference(seeded(stack), config, device=CpuDevice()) as runner:
        try:
            told.append(f"returned {runner.load_checkpoint(*loads[rank])}")
        except RanksError as error:
            told.append(str(error))
        assert runner.load_checkpoint(Path(folder, "saved"))[0].name == "after"
    return told


def unlike(rank: int, *, folder: str) -> str:
    """Load folders of the same name without a shared file system; rank 1's is of another step."""
    own = Path(folder, str(rank))
    with open_engine(seeded(stack), engine_config(folder=folder, micro=SAMPLES)) as engine:
        for step in (1, 2):
            train(engine, token_batches(1, batch=SAMPLES))
            engine.save_checkpoint(Path(folder, str(step - 1)), "a")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.path.abspath", lambda path: "/machine")
            patch.setattr("os.path.realpath", lambda path: "/machine")
            try:
                engine.load_checkpoint(own)
            except RanksError as error:
                return str(error)
    return ""


def unfit(rank: int, *, folder: str) -> list[str]:
    """Save while one rank's client_state cannot be saved: no rank may save, and none may hang."""
    with open_engine(seeded(stack), engine_config(folder=folder, micro=SAMPLES)) as engine:
        try:
            engine.save_checkpoint(Path(folder, "saved"), client_state={"f": Path("a")} if rank == 1 else {})
        except CheckpointError as error:
            return [str(error), str(Path(folder, "saved").exists())]
    return []
