"""Parts and settings of an engine that checkpoints read and write, and the comparison of settings before a load."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from infinity.checkpoint.format import Index
from infinity.comm.communicator import Communicator
from infinity.errors import CheckpointError
from infinity.plan.plan import Plan
from infinity.rules import MomentFormat, RuleName
from infinity.schedule.schedule import Schedule
from infinity.tiers.device import Device
from infinity.units.states import UnitStates
from infinity.units.store import UnitStore
from infinity.units.unit import Unit


class Runner(Protocol):
    """Fetches units (`infinity.engine.runner`)."""

    def refresh_viewed(self) -> None: ...


class ModelParts(Protocol):
    """Parts of an engine that hold the states of its units."""

    @property
    def plan(self) -> Plan: ...
    @property
    def units(self) -> list[Unit]: ...
    @property
    def ranks(self) -> Communicator: ...
    @property
    def device(self) -> Device: ...
    @property
    def states(self) -> UnitStates: ...
    @property
    def store(self) -> UnitStore: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def runner(self) -> Runner: ...


@dataclass(frozen=True)
class Run:
    """Settings and progress of a training run. Loading compares the settings and restores the progress."""

    optimizer: str
    """Type of the optimizer, as in the config."""
    rule: RuleName
    moments: MomentFormat
    seed: int
    """Seed of the stochastic rounding of moments."""
    global_steps: int
    skipped_steps: int
    param_groups: list[dict[str, Any]]
    """Hyper-parameters by group, without the parameters."""
    lr_scheduler: dict[str, Any] | None
    loss_scale: dict[str, Any] | None


_KINDS: dict[str, tuple[type, ...]] = {
    "truth value": (bool,),
    "number": (int, float),
    "text": (str,),
    "list": (list, tuple),
    "section": (dict,),
}


def check_settings(run: Run, index: Index, folder: Path) -> None:
    """Raise CheckpointError if a saved value is of another kind than the present one. None is of every kind."""
    pairs = zip(run.param_groups, index.param_groups, strict=True)
    for name, present, saved in (
        *((f"param_groups[{number}]", *pair) for number, pair in enumerate(pairs)),
        ("lr_scheduler", run.lr_scheduler or {}, index.lr_scheduler or {}),
        ("loss_scale", run.loss_scale or {}, index.loss_scale or {}),
    ):
        for key, value in saved.items():
            for problem in _problems(present.get(key), value, finite=name.startswith("param_groups")):
                raise CheckpointError(f"{folder} is damaged: {name}.{key} {problem}; use another checkpoint")


def _problems(present: Any, saved: Any, *, finite: bool) -> Iterator[str]:
    """finite: numbers must be."""
    if finite and isinstance(saved, float) and not math.isfinite(saved):
        yield f"is {saved}"
    if None in (present, saved):
        return
    if _kind(present) != _kind(saved):
        yield f"is {saved!r:.40}, which is no {_kind(present)}"
    elif isinstance(saved, list) and present:
        for value in saved:
            yield from _problems(present[0], value, finite=finite)


def _kind(value: object) -> str:
    return next((name for name, types in _KINDS.items() if isinstance(value, types)), "value")
