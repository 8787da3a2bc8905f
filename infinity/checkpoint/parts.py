"""Parts and settings of an engine that checkpoints read and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from infinity.comm.communicator import Communicator
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
