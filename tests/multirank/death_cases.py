"""A rank that ends, hangs or fails in mid-training. The code runs in the processes of a `support.ranks.Group`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.comm.communicator import Communicator
from infinity.comm.groups import new_group
from infinity.comm.side import SideChannel
from infinity.errors import CheckpointError, RanksError, UsageError
from infinity.plan.layout import Slot, UnitLayout
from infinity.tiers.device import CpuDevice
from infinity.units.states import Flats, UnitStates
from support.configs import engine_config
from support.models import Stack, seeded, token_batches

SAMPLES = 4
TIMEOUT = 2
"""Seconds after which a silent rank is lost. Generous for a busy machine, since heartbeats need no GIL."""
TOO_MUCH = 1 << 50
"""Bytes that no machine has."""


def _raise() -> None:
    raise ValueError("the user's own")


WAYS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: os._exit(1),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raises": _raise,
    "MemoryError": lambda: bytearray(TOO_MUCH),
    "allocation": lambda: torch.empty(TOO_MUCH, dtype=torch.uint8),
}


def left_alone(rank: int, *, folder: str, where: str, how: str, stage: int) -> dict[str, Any]:
    """The last rank ends in its third step, in one of WAYS: in forward, in backward, before `step()`, or in a save.

    Returns what this rank raised, and what it says when it is used after that.
    """
    last = rank == torch.distributed.get_world_size() - 1
    places = ("nvme", "nvme") if stage == 3 else ("none", "nvme")
    config = engine_config(*places, folder=folder, micro=SAMPLES, stage=stage, rank_timeout=TIMEOUT)
    model = seeded(Stack)
    step = 0
    read = UnitStates.read_range

    def end(at: str) -> None:
        if last and step == 2 and at == where:
            WAYS[how]()

    def read_range(*given: Any) -> Flats:
        end("save")
        end("background save")
        return read(*given)

    model.blocks[3].register_forward_hook(lambda *_: end("forward"))
    model.blocks[3].register_full_backward_hook(lambda *_: end("backward"))
    said = {"raised": "", "stopped": ""}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitStates, "read_range", read_range)
        engine = infinity.initialize(model=model, config=config, device=CpuDevice())[0]
        try:
            for step, batch in enumerate(token_batches(6, batch=SAMPLES, seed=rank)):
                loss = engine(*batch)
                engine.backward(loss)
                end("step")
                engine.step()
                if step == 2 and where.endswith("save"):
                    engine.save_checkpoint(Path(folder, "saved"), "a", background=where == "background save")
        except (RanksError, CheckpointError) as error:
            said["raised"] = f"{type(error).__name__}: {error}"
            try:
                engine(*batch)
            except (UsageError, RanksError) as again:
                said["stopped"] = str(again)
        except Exception as error:  # noqa: BLE001 - of WAYS
            said["raised"] = f"{type(error).__name__}: {error}"
            engine.close()
        with suppress(CheckpointError):  # of a background save, unless it was raised before
            engine.close()
    return said


LARGE = 64 << 20
"""Elements of a tensor whose exchange takes a tenth of a second."""


def killed_in_transit(rank: int, *, collective: str) -> tuple[str, float]:
    """Rank 1 is killed while parts of a large tensor are in transit. Returns the other's error, and the seconds that
    closing takes.
    """
    ranks = Communicator(CpuDevice(), rank_timeout=TIMEOUT)
    slot = Slot("weight", (LARGE,), 0, 0)
    layout = UnitLayout(0, "unit", (slot,), torch.float32, True, LARGE, ranks.size)
    ranks.set_layouts([layout])
    side = SideChannel(ranks)
    flat = torch.ones(LARGE)
    exchanges: dict[str, Callable[[], object]] = {
        "gather": lambda: ranks.complete(flat),
        "reduce": lambda: ranks.reduce(flat, layout, set()).wait(),
        "save": lambda: side.complete(flat),
    }
    exchanges[collective]()
    if rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(RanksError) as raised:
        while True:
            exchanges[collective]()
    began = time.monotonic()
    side.close()
    ranks.close()
    return str(raised.value), time.monotonic() - began


def makes_a_group_alone(rank: int) -> str:
    """The last rank does not make the group. Returns what the others raise."""
    if rank == torch.distributed.get_world_size() - 1:
        return ""
    with pytest.raises(RanksError) as raised:
        new_group(None, timedelta(seconds=1), "gloo")
    return str(raised.value)
