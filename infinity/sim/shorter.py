"""Changes with which a simulated step would be shorter. Those that another simulation can show are simulated first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from infinity.errors import ModelError, UsageError
from infinity.observe.units import show_bytes
from infinity.plan.placement import State
from infinity.sim.needs import Needs, kept_by_auto
from infinity.sim.simulate import Simulation

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
    kept = kept_by_auto(simulation.plan, needs)
    given: set[str] = set()
    for lane, seconds in lanes:
        if seconds < _EXPOSED * simulation.seconds:
            return
        if lane in ("nvme_read", "nvme_write") and kept > 0 and config.infinity.memory.host is None:
            change = f'set infinity.memory.host to "auto", which keeps up to {show_bytes(kept)} of states off the drive'
        elif lane in ("nvme_read", "nvme_write", "update") and config.infinity.moments == "fp32":
            change = 'set infinity.moments to "bf16" or "8bit", which moves fewer bytes'
        elif lane == "activations":
            change = "raise infinity.activations.memory_bytes" + ("" if checkpointed else ", or checkpoint activations")
        else:
            change = "raise the micro-batch: a step computes longer and moves as many bytes of states"
        if change not in given:
            given.add(change)
            yield f"the model waits {seconds:.3g} s of {simulation.seconds:.3g} s for {lane}: {change}"


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
        section = config.infinity.model_copy(update={"forward_updates": share})
        seen, needs = again(config.model_copy(update={"infinity": section}))
        if not needs.limits and seen.seconds < shortest:
            shortest, found = seen.seconds, share
    if found:
        yield (
            f"infinity.forward_updates {found:g} keeps the drive busy during forward: {shortest:.3g} s in place of "
            f"{backward.seconds:.3g} s"
        )
