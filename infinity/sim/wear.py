"""Wear of a node's drive: the days until its rating is reached, and changes with which a step writes less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infinity.observe.units import show_bytes
from infinity.plan.formats import state_format
from infinity.plan.placement import State
from infinity.sim.needs import Needs, enough, kept_by_auto
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
    def _rating(self) -> int:
        return PETABYTE if self.rated is None else self.rated

    def to_json(self) -> dict[str, float]:
        return {"rated_bytes": self._rating, "days": self.days}

    def __str__(self) -> str:
        if self.rated is None:
            return f"each PB that the drive is rated for lasts {_shown(self.days)}"
        return f"the drive's rating of {show_bytes(self.rated)} is reached in {_shown(self.days)}"


def wear_of(simulation: Simulation, ranks_per_node: int, rated: int | None) -> Wear | None:
    """Return the wear of a node's drive, by saved activations too; None if a step writes nothing."""
    saved = simulation.activation_bytes_written if "nvme" in simulation.activations else 0
    written = (simulation.nvme_bytes_written + saved) * ranks_per_node
    return Wear(written, simulation.seconds, rated) if written else None


def longer(wear: Wear, config: Config, simulation: Simulation, needs: Needs, ranks_per_node: int) -> Iterator[str]:
    """Yield changes with which a rating lasts a year that would not, the smallest first."""
    if wear.rated is None or wear.days >= _YEAR:
        return
    missing = int(wear.written * (1 - wear.days / _YEAR))
    changes = list(_changes(wear, config, simulation, needs, ranks_per_node))
    found = ", and ".join(enough(changes, missing)) if changes else "use a drive with a higher rating"
    yield f"the drive's rating is reached in {_shown(wear.days)}: {found}"


def _changes(wear: Wear, config: Config, simulation: Simulation, needs: Needs, ranks: int) -> Iterator[tuple[int, str]]:
    """Yield (bytes that a step writes less, change)."""
    plan, held = simulation.plan, needs.tiers["nvme"]
    stored = held["params"] + held["gradients"] + held["optimizer"]
    kept = kept_by_auto(plan, needs)
    if kept > 0 and simulation.nvme_bytes_written and config.infinity.memory.host is None:
        gradients = sum(n for name, n in simulation.order.get("nvme_write", ()) if name.startswith("gradient")) * ranks
        what = "gradients and states" if gradients else "states"
        less = int(simulation.nvme_bytes_written * ranks * min(1.0, kept / stored))
        yield less, f'set infinity.memory.host to "auto", which writes up to {show_bytes(less)} of {what} less a step'
    if config.infinity.moments != "8bit":
        less = 0
        for layout in plan.units:
            if plan.placement.holds(layout.index, State.OPTIM):
                extent = plan.placement.of(layout.index, State.OPTIM)
                smaller = state_format(layout.dtype, config.infinity.master, config.optimizer.rule, "8bit")
                less += (extent.nbytes - smaller.nbytes(layout.shard_numel)) * ranks * (extent.tier == "nvme")
        if less > 0:
            yield less, f'set infinity.moments to "8bit", which writes {show_bytes(less)} less a step'


def _shown(days: float) -> str:
    return f"{days:.3g} days" if days < 2 * _YEAR else f"{days / _YEAR:.3g} years"
