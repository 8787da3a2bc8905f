"""Wear of a node's drive: the days until its rating is reached, and changes with which a step writes less."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infinity.errors import InfinityError
from infinity.observe.units import show_bytes
from infinity.sim.shorter import Again
from infinity.sim.simulate import Simulation

if TYPE_CHECKING:
    from infinity.config import Config

PETABYTE = 10**15
"""Rating that is shown if the drive's is not given."""
_SECONDS_OF_A_DAY = 86_400
_YEAR = 365


@dataclass(frozen=True)
class Wear:
    """Bytes that training writes to a node's drive."""

    written: int
    """Bytes of a step."""
    seconds: float
    """Seconds of a step."""
    rated: int | None
    """Bytes that the drive is rated for, of all drives of a node together; None: not given."""

    @property
    def a_day(self) -> float:
        return self.written * _SECONDS_OF_A_DAY / self.seconds

    @property
    def days(self) -> float:
        """Days until the rating is reached, or `PETABYTE` without one."""
        return self._rating / self.a_day

    @property
    def steps(self) -> float:
        """Steps until the rating is reached, or `PETABYTE` without one."""
        return self._rating / self.written

    @property
    def lasts(self) -> str:
        """Return the days and steps until the rating is reached, as text."""
        return f"{_shown(self.days)}, or {_rounded(self.steps):,} steps"

    @property
    def _rating(self) -> int:
        return PETABYTE if self.rated is None else self.rated

    def to_json(self) -> dict[str, float]:
        return {"rated_bytes": self._rating, "days": self.days, "steps": self.steps}

    def __str__(self) -> str:
        if self.rated is None:
            return f"each PB that the drive is rated for lasts {self.lasts}"
        return f"the drive's rating of {show_bytes(self.rated)} is reached in {self.lasts}"


def wear_of(simulation: Simulation, ranks_per_node: int, rated: int | None) -> Wear | None:
    """Return the wear of a node's drive, by saved activations too; None if a step writes nothing."""
    saved = simulation.activation_bytes_written if "nvme" in simulation.activations else 0
    written = (simulation.nvme_bytes_written + saved) * ranks_per_node
    return Wear(written, simulation.seconds, rated) if written else None


def longer(wear: Wear, again: Again, config: Config, ranks_per_node: int) -> Iterator[str]:
    """Yield changes with which a rating lasts more steps that would not last a year, as simulated; the most first."""
    if wear.rated is None or wear.days >= _YEAR:
        return
    lasts = f"{_rounded(wear.steps):,} ({_shown(wear.days)})"
    found = []
    for change, changed in _changes(config):
        try:
            seen, needs = again(changed)
        except InfinityError:  # such as 8-bit moments of tiles that cut their blocks
            continue
        after = wear_of(seen, ranks_per_node, wear.rated)
        steps = math.inf if after is None else after.steps
        if not needs.limits and steps > wear.steps:
            then = "no step writes to it"
            if after is not None:
                then = f"its rating lasts {_rounded(steps):,} steps ({_shown(after.days)}) instead of {lasts}"
            found.append((steps, f"to spare the drive, {change}: {then}"))
    if not found:
        yield f"the drive's rating lasts {_shown(wear.days)}: use a drive with a higher rating"
    yield from (text for _, text in sorted(found, key=lambda item: -item[0]))


def _changes(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield changes with which a step may write less."""
    section, memory = config.infinity, config.infinity.memory
    if memory.host is None:
        memory = memory.model_copy(update={"host": "auto"})
        yield 'set infinity.memory.host to "auto"', _with(config, memory=memory)
    if section.moments != "8bit":
        yield 'set infinity.moments to "8bit"', _with(config, moments="8bit")


def _with(config: Config, **keys: object) -> Config:
    return config.model_copy(update={"infinity": config.infinity.model_copy(update=keys)})


def _shown(days: float) -> str:
    return f"{days:.3g} days" if days < 2 * _YEAR else f"{days / _YEAR:.3g} years"


def _rounded(steps: float) -> int:
    """Return the whole number of steps, to three digits."""
    return int(float(f"{steps:.3g}"))
