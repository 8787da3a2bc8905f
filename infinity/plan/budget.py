"""Placement by budget: chooses the states that stay in faster memory than the config's tiers. Pure.

A training step uses units in a cycle, and a fixed subset in fast memory is optimal for a cyclic scan: its bytes are
saved in every step, while a cache of the least recently used units saves none. `on_device` chooses the states on the
device, then `fill` those in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from infinity.plan.layout import UnitLayout
from infinity.plan.placement import Policy, State, aligned, place
from infinity.plan.policy import DeviceInfo
from infinity.tier_kind import TierKind

_SHARE = 2
"""Divisor of the limit on the device's memory. By default, states and buffers fill this part; the rest is for
activations, which a plan does not count."""

_CLASSES = 3
"""Number of sizes whose units may be kept before smaller ones, such as those of an embedding and a head."""

_KINDS = (State.PARAM, State.OPTIM, State.GRAD)
"""Kinds of states in the order in which those of equal traffic get room."""

_Item = TypeVar("_Item")
Faster = Mapping[tuple[int, State], TierKind]
"""(unit index, state) → tier, for states that a budget keeps in faster memory than the config names."""


@dataclass(frozen=True)
class Budget:
    """Bytes of one rank's share of its node: `infinity.memory`. None: no budget."""

    host: int | None = None
    """Bytes that states and buffers fill, those of the device included if the host computes."""
    params: int | None = None
    """Parameters, in elements, that stay in host memory. None: as `host` allows."""
    nvme: int | None = None
    """Limit on the bytes of states."""
    device_optimizer: float | None = None
    """Share of the optimizer states, by elements, that stays on the device. None: all states of as many units as
    `device_states` allows."""
    device_states: int | None = None
    """Bytes of the device that states and buffers fill. None: half of `DeviceInfo.limit`; without a limit, none."""
    free_nvme: int | None = None
    """Free bytes on nvme, for what an engine can do without. None: unknown, and taken as enough."""


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


def on_device(
    layouts: Sequence[UnitLayout],
    policy: Policy,
    budget: Budget,
    device: DeviceInfo,
    needed: Callable[[Faster], int],
) -> Faster:
    """Return the states that stay on a device with memory of its own, although the config places them elsewhere.

    needed: states on the device → bytes of the device with all buffers. All states of a unit stay together, from the
    first unit on: backward ends with the gradients of the first units, and the next forward
    begins with their parameters, so that nothing hides their update on the host [Note: states on the device].
    """
    if device.host_addressable:
        return {}
    trained = [layout for layout in layouts if layout.trainable]
    if budget.device_optimizer is not None:
        elements = int(budget.device_optimizer * sum(unit.shard_numel for unit in trained))
        updated = _within(elements, trained, lambda unit: unit.shard_numel)
        states = State if policy.resident else (State.OPTIM, State.GRAD)
        return {(unit.index, state): TierKind.DEVICE for unit in updated for state in states}
    room = device.limit and device.usable // _SHARE if budget.device_states is None else budget.device_states
    if not room or not device.updates:
        return {}
    placement = place(layouts, policy)

    def moved(unit: UnitLayout) -> list[State]:
        return [state for state in State if placement.holds(unit.index, state) and not policy.tier_of(state).on_device]

    def nbytes(unit: UnitLayout) -> int:
        return sum(aligned(placement.of(unit.index, state).nbytes) for state in moved(unit))

    first = trained if not policy.optim_tier.on_device else []
    rest = spread([layout for layout in layouts if layout not in first])
    fitting = _within(room - needed({}), [*first, *rest], nbytes)
    return {(unit.index, state): TierKind.DEVICE for unit in fitting for state in moved(unit)}


def fill(
    layouts: Sequence[UnitLayout],
    policy: Policy,
    accumulation: int,
    budget: Budget,
    device: DeviceInfo,
    placed: Faster,
    needed: Callable[[Faster], int],
) -> Faster:
    """Return `placed`, the states on the device, and the states on nvme that host memory has room for.

    needed: states in faster tiers → bytes of host memory with all buffers. `turns` gives the order in which states get
    room. Buffers have the size of the largest states on nvme, so the largest units may need less memory in the host's
    than on nvme. `_starts` yields the choices that keep these; those that fit are filled. Of the results, it is the
    one that keeps most of the first kind, then of the second, and so on; if none fits, the one of the fewest bytes.
    """
    kinds = dict(turns(layouts, policy, accumulation, device, placed))
    if budget.params is not None and State.PARAM in kinds:
        kinds[State.PARAM] = _within(budget.params, kinds[State.PARAM], lambda unit: unit.shard_numel)
    if budget.host is None:
        return {**placed, **({} if budget.params is None else _in_host({State.PARAM: kinds.get(State.PARAM, [])}))}
    host = budget.host

    def fitting_in(chosen: Faster) -> Faster:
        """Return states of the first kind that has some for which there is room; empty if none has."""
        for state, units in kinds.items():
            left = [unit for unit in units if (unit.index, state) not in chosen]
            every = place(layouts, policy, {**chosen, **_in_host({state: left})})
            sizes = {unit.index: aligned(every.of(unit.index, state).nbytes) for unit in left}
            added = _within(host - needed(chosen), left, lambda unit: sizes[unit.index]) if left else []  # noqa: B023
            if added:
                return _in_host({state: added})
        return {}

    def filled(chosen: Faster) -> Faster:
        """Return `chosen` with all states for which there is room. States in host memory may leave more room, since
        buffers become smaller, so the turns begin anew until nothing fits.
        """
        while added := fitting_in(chosen):
            chosen = {**chosen, **added}
        return chosen

    def kept(chosen: Faster) -> list[int]:
        elements = dict.fromkeys(kinds, 0)
        for unit, state in chosen.keys() - placed.keys():
            elements[state] += layouts[unit].shard_numel
        return list(elements.values())

    whole = place(layouts, policy, {**placed, **_in_host(kinds)})
    bare = needed(placed)
    # A choice needs at least the bytes of its states, and gains nothing if it needs more than none.
    saving = [start for start in _starts(kinds) if sum(whole.of(*key).nbytes for key in start) <= bare]
    starts = [({**placed, **start}, needed({**placed, **start})) for start in saving]
    accepted = [(start, nbytes) for start, nbytes in starts if nbytes <= host]
    if not accepted:
        return min(starts, key=lambda each: each[1])[0]
    return max((filled(start) for start in _useful(accepted)), key=kept)


def _starts(kinds: Mapping[State, Sequence[UnitLayout]]) -> Iterator[Faster]:
    """Yield every combination of the largest units of each kind: none, those of the largest sizes, or all."""

    def largest(units: Sequence[UnitLayout]) -> list[list[UnitLayout]]:
        sizes = sorted({unit.shard_numel for unit in units}, reverse=True)
        least = [*sizes[:_CLASSES], *sizes[-1:]]
        return [[], *([unit for unit in units if unit.shard_numel >= size] for size in dict.fromkeys(least))]

    for choice in product(*map(largest, kinds.values())):
        yield _in_host(dict(zip(kinds, choice, strict=True)))


def _useful(starts: Sequence[tuple[Faster, int]]) -> Iterator[Faster]:
    """Yield the choices without those that contain another one of as few bytes: they can only keep other units."""
    for start, nbytes in starts:
        if not any(other.keys() < start.keys() and fewer <= nbytes for other, fewer in starts):
            yield start


def turns(
    layouts: Sequence[UnitLayout], policy: Policy, accumulation: int, device: DeviceInfo, placed: Faster
) -> Iterator[tuple[State, list[UnitLayout]]]:
    """Yield the kinds of states on nvme, and the units of each without those in `placed`, in the order in which they
    get room [Note: placement by budget].

    Kinds take their turns by the bytes that they save, optimizer states before gradients that save as many. If the host
    computes, with one micro-batch, optimizer states come first. Units are spread evenly over the model, so that the
    drive is in use as long as the step takes. On a device with memory of its own, if updates follow their gradients,
    the first units come first.
    """
    updated_first = device.host_addressable and accumulation == 1

    def turn(state: State) -> tuple[bool, float]:
        return updated_first and state is not State.OPTIM, -traffic(state, policy, accumulation)

    for state in sorted(_KINDS, key=turn):
        if policy.tier_of(state).in_memory:
            continue
        units = [layout for layout in layouts if state is State.PARAM or layout.trainable]
        units = [unit for unit in units if (unit.index, state) not in placed]
        from_first = policy.grads_pass and not device.host_addressable
        if units:
            yield state, units if from_first else list(spread(units))


def _in_host(chosen: Mapping[State, Iterable[UnitLayout]]) -> Faster:
    return {(unit.index, state): TierKind.HOST for state, units in chosen.items() for unit in units}


def _within(room: int, units: Sequence[UnitLayout], size: Callable[[UnitLayout], int]) -> list[UnitLayout]:
    """Return the units, the first ones first, whose sizes are at most `room` together."""
    found = []
    for unit in units:
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
