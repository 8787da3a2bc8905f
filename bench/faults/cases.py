"""Draws a training of a small model and its fault from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

KILLS = ("kill at a request", "kill at a system call", "kill at a time")
"""Kinds of faults that end a process by SIGKILL."""
WEIGHTS = {
    "kill at a request": 14,
    "kill at a system call": 10,
    "kill at a time": 8,
    "stopped for a moment": 4,
    "hang": 1,
    "no space": 7,
    "small file system": 2,
    "I/O error": 8,
    "short transfer": 7,
    "refused submission": 5,
    "cut file": 4,
    "cut file at rest": 4,
    "bit flip on the way": 5,
    "bit flip at rest": 5,
    "slow drive": 3,
    "failed sync": 5,
    "memory limit": 5,
    "clock jump": 3,
}
"""Kind of fault → weight in the draw."""
NEED_CHECKSUMS = ("cut file", "bit flip on the way")
NEED_DURABLE = ("cut file at rest", "bit flip at rest", "failed sync")
NEED_RANKS = ("hang",)


@dataclass(frozen=True)
class Setting:
    """A training. update, precision: keys of the config, as `training.config` translates them."""

    ranks: int
    param: str
    optim: str
    precision: str
    clips: bool
    accumulation: int
    update: str
    checksum: bool
    durable: bool
    saves: str = ""
    """How a checkpoint is saved after the third step: "", "at once" or "in the background"."""

    @property
    def numbers(self) -> Setting:
        """The setting with equal losses and parameters that keeps every state in memory."""
        return replace(
            self, param="none", optim="none", update="after_backward", checksum=False, durable=False, saves=""
        )


@dataclass(frozen=True)
class Fault:
    """kind: a key of WEIGHTS. rank: on which it is injected. at: place in the training, from 0 to 1.

    value: parameter of the kind, from 0 to 1. again: place at which the resumed process is killed, too; -1: not killed.
    closes: True if the script closes its engine after an error.
    """

    kind: str
    rank: int
    at: float
    value: float
    again: float
    closes: bool


@dataclass(frozen=True)
class Case:
    seed: int
    setting: Setting
    fault: Fault


def draw(seed: int) -> Case:
    """Return the case of a seed. Deterministic."""
    random_ = random.Random(seed)
    kind = random_.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    ranks = 2 if kind in NEED_RANKS or random_.random() < 0.2 else 1
    durable = kind in NEED_DURABLE or random_.random() < (0.85 if kind in KILLS else 0.4)
    param, optim = random_.choice([("nvme", "nvme"), ("nvme", "nvme"), ("cpu", "nvme"), ("nvme", "cpu")])
    clips = random_.random() < 0.5
    updates = ["after_backward", "next_forward"] if clips else ["after_backward", "next_forward", "during_backward"]
    setting = Setting(
        ranks=ranks,
        param=param,
        optim=optim,
        precision=random_.choice(["fp32", "bf16, 8 bit", "bf16, fp32 masters"]),
        clips=clips,
        accumulation=random_.choice([1, 1, 2]),
        update=random_.choice(updates),
        checksum=kind in NEED_CHECKSUMS or random_.random() < 0.3,
        durable=durable,
    )
    fault = Fault(
        kind=kind,
        rank=random_.randrange(ranks),
        at=random_.random(),
        value=random_.random(),
        again=random_.random() if durable and kind in KILLS and random_.random() < 0.3 else -1.0,
        closes=random_.random() < 0.5,
    )
    saves = random_.choices(["", "at once", "in the background"], [3, 1, 1])[0]
    return Case(seed, replace(setting, saves=saves), fault)
