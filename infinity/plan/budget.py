"""Placement by budget: the states that memory faster than the config's tiers has room for. Pure.

A training step uses units in a cycle, and a fixed subset in fast memory is optimal for a cyclic scan: its bytes are
saved in every step, while a cache of the least recently used units saves none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from infinity.plan.layout import UnitLayout
from infinity.plan.placement import Placement, Policy, State, aligned

_Item = TypeVar("_Item")
Faster = Mapping[tuple[int, State], str]
"""(unit index, state) → tier, for states that a budget keeps in faster memory than the config names."""


@dataclass(frozen=True)
class Budget:
    """Bytes of one rank's share of its node: `infinity.memory`. None: no budget."""

    host: int | None = None
    """States fill it; it includes all buffers, and the device's memory if the host computes."""
    params: int | None = None
    """Parameters, in elements, that stay in host memory. None: as `host` allows."""
    nvme: int | None = None
    """Limit on states."""


def traffic(state: State, policy: Policy, accumulation: int) -> float:
    """Return the bytes of `state` that a step moves between its tier and the step, for each byte stored.

    Parameters are read in the forward and the backward of each micro-batch and written once; optimizer states are read
    and written once. A gradient is written, or read and written, by each micro-batch, and read by the update.
    """
    if state is State.PARAM:
        return 2 * accumulation + 1
    if state is State.GRAD:
        return 0 if policy.grads_pass else 2 * accumulation
    return 2


def fill(
    layouts: Sequence[UnitLayout],
    policy: Policy,
    accumulation: int,
    budget: Budget,
    needed: Callable[[Faster], tuple[Placement, int]],
) -> Faster:
    """Return the states on nvme that host memory has room for.

    needed: states in host memory → the placement, and the bytes of host memory with all buffers. Kinds of states are
    placed in the order of the bytes that they save, and units of a kind evenly over the model, so that the drive is in
    use as long as the step takes.
    """
    chosen: dict[tuple[int, State], str] = {}
    kinds = [State.PARAM] if budget.host is None else sorted(State, key=lambda s: -traffic(s, policy, accumulation))
    for state in kinds:
        units = [layout for layout in layouts if state is State.PARAM or layout.trainable]
        if policy.tier_of(state) != "nvme" or not traffic(state, policy, accumulation):
            continue
        if state is State.PARAM and budget.params is not None:
            units = _within(budget.params, units, lambda unit: unit.shard_numel)
        every = {**chosen, **{(unit.index, state): "host" for unit in units}}
        if budget.host is None or needed(every)[1] <= budget.host:  # buffers that only states on nvme need are gone
            chosen = every
            continue
        placement, nbytes = needed(chosen)
        sizes = {unit.index: aligned(placement.of(unit.index, state).nbytes) for unit in units}
        fitting = _within(budget.host - nbytes, units, lambda unit: sizes[unit.index])  # noqa: B023 - called here
        chosen |= {(unit.index, state): "host" for unit in fitting}
    return chosen


def _within(room: int, units: Sequence[UnitLayout], size: Callable[[UnitLayout], int]) -> list[UnitLayout]:
    """Return units, spread over the model, whose sizes are at most `room` together."""
    found = []
    for unit in spread(units):
        if size(unit) <= room:
            found.append(unit)
            room -= size(unit)
    return found


def spread(items: Sequence[_Item]) -> Iterator[_Item]:
    """Yield the items in an order in which the first n are spread evenly, for every n.

    The order is that of the van der Corput sequence: indices with their bits reversed.
    """
    bits = max(0, len(items) - 1).bit_length()
    for index in range(1 << bits):
        place = int(f"{index:0{bits}b}"[::-1], 2) if bits else 0
        if place < len(items):
            yield items[place]
