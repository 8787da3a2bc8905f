"""Advice of `infinity plan`: changes with which a simulated step would be shorter, or would wear the drive less.

Changes that another simulation can show are simulated first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infinity.errors import InfinityError, ModelError, UsageError
from infinity.plan.placement import State
from infinity.plan.policy import speculates
from infinity.sim.needs import Needs, kept_by_auto
from infinity.sim.simulate import Simulation
from infinity.sizes import show_bytes
from infinity.tier_kind import TierKind

if TYPE_CHECKING:
    from infinity.config import Config


Again = Callable[..., tuple[Simulation, Needs]]
"""(config, train_batch=False) → a simulation of the same model on the same machine, and the memory that it needs."""

_EXPOSED = 0.05
"""Share of a step that a lane has to expose before advice names it, and by which a change has to shorten the step."""
_MOVES_PARAMS = ("nvme_read", "host_to_device", "gather")
"""Lanes that carry parameters to where the model computes."""
_UPDATES_ON_NVME = ("nvme_read", "nvme_write", "update")
"""Lanes of updates whose states are on nvme."""
_SHARES_IN_FORWARD = (0.15, 0.25)
"""Values of infinity.forward_updates that are tried: forward takes about a third of a pass forward and backward."""


def faster(config: Config, simulation: Simulation, needs: Needs, *, checkpointed: bool) -> Iterator[str]:
    """Yield changes that shorten the exposed lanes, the longest first, each once.

    checkpointed: the model recomputes activations already.
    """
    lanes = sorted(simulation.exposed.items(), key=lambda item: -item[1])
    kept, states = kept_by_auto(simulation.plan, needs), sum(needs.tiers[TierKind.NVME].values())
    ranks = simulation.plan.ranks.size
    given: set[str] = set()
    for lane, seconds in lanes:
        if seconds < _EXPOSED * simulation.seconds:
            return
        keeps = kept >= max(1, _EXPOSED * states) and config.infinity.memory.host is None
        if lane in ("nvme_read", "nvme_write") and keeps:
            change = f'set infinity.memory.host to "auto", which keeps up to {show_bytes(kept)} of states off the drive'
        elif lane in ("nvme_read", "nvme_write", "update") and config.infinity.moments == "fp32":
            change = 'set infinity.moments to "bf16" or "8bit", which moves fewer bytes'
        elif lane == "activations":
            change = "raise infinity.activations.memory_bytes" + ("" if checkpointed else ", or checkpoint activations")
        else:
            change = "raise the micro-batch: a step computes longer and moves as many bytes of states"
        if change not in given:
            given.add(change)
            waits = f"the model waits {seconds:.3g} s of {simulation.seconds:.3g} s"
            yield f"{waits} for {name_of_wait(lane, ranks)}: {change}"


def name_of_wait(lane: str, ranks: int) -> str:
    """Return the name of an exposed lane. The model's thread itself delays compute by Python, launches and wake-ups;
    one rank reduces nothing with others.
    """
    names = {"compute": "the host", "reduce": "sums and norms of gradients" if ranks == 1 else "reduce"}
    return names.get(lane, lane)


def whole_step(again: Again, config: Config, loop: Simulation) -> Iterator[str]:
    """Yield that `engine.train_batch` with blocks is faster than the loop over micro-batches, if its simulation is and
    fits. A model without such blocks, as one with dropout, gets no advice.
    """
    exposed = sum(loop.exposed.get(lane, 0.0) for lane in _MOVES_PARAMS)
    if loop.plan.accumulation == 1 or exposed < _EXPOSED * loop.seconds:
        return
    try:
        seen, needs = again(config, train_batch=True)
    except (ModelError, UsageError):
        return
    if not seen.ordinary and not needs.limits and seen.seconds < (1 - _EXPOSED) * loop.seconds:
        yield (
            "engine.train_batch(blocks=...) moves parameters once a step in place of once a micro-batch: "
            f"{seen.seconds:.3g} s in place of {loop.seconds:.3g} s"
        )


def split_updates(again: Again, config: Config, backward: Simulation) -> Iterator[str]:
    """Yield a share of updates to leave to the next forward, if a simulated step is shorter with it and fits.

    backward: a step that updates all units during backward.
    """
    plan = backward.plan
    waits = sum(backward.exposed.get(lane, 0.0) for lane in _UPDATES_ON_NVME)
    if plan.update != "during_backward" or plan.in_forward or "nvme" not in plan.placement.tiers(State.OPTIM):
        return
    if waits < _EXPOSED * backward.seconds:
        return
    shortest, found = (1 - _EXPOSED) * backward.seconds, 0.0
    for share in _SHARES_IN_FORWARD:
        seen, needs = again(_with(config, forward_updates=share))
        if not needs.limits and seen.seconds < shortest:
            shortest, found = seen.seconds, share
    if found:
        yield (
            f"infinity.forward_updates {found:g} keeps the drive busy during forward: {shortest:.3g} s in place of "
            f"{backward.seconds:.3g} s"
        )


def drafts(again: Again, config: Config, waiting: Simulation) -> Iterator[str]:
    """Yield a limit of host memory with room for second slots, if a simulated step with drafts is shorter and fits.

    waiting: a step whose updates wait for the norm of all gradients.
    """
    plan, memory = waiting.plan, config.infinity.memory
    if plan.device.host_addressable or plan.drafted or memory.host is not None or not speculates(config):
        return
    seen, needs = again(_with(config, memory=memory.model_copy(update={"host": "auto"})))
    if seen.plan.drafted and not needs.limits and seen.seconds < (1 - _EXPOSED) * waiting.seconds:
        yield (
            'infinity.memory.host "auto" has room for second slots, so that backward updates units before the norm is '
            f"known: {seen.seconds:.3g} s in place of {waiting.seconds:.3g} s"
        )


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
    def _rating(self) -> int:
        return PETABYTE if self.rated is None else self.rated

    def to_json(self) -> dict[str, float]:
        return {"rated_bytes": self._rating, "days": self.days, "steps": self.steps}

    def __str__(self) -> str:
        lasts = f"{_shown(self.days)}, or {_rounded(self.steps):,} steps"
        if self.rated is None:
            return f"each PB that the drive is rated for lasts {lasts}"
        return f"the drive's rating of {show_bytes(self.rated)} is reached in {lasts}"


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
                kind = "shorter steps" if after.days < wear.days else "steps"  # more of them in less time
                then = f"its rating lasts {_rounded(steps):,} {kind} ({_shown(after.days)}) instead of {lasts}"
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
