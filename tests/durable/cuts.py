"""Power cuts of one or several ranks: every combination of moments that their exchanges allow.

The power fails on all ranks at once or on each at a moment of its own, since a rank goes on until it needs the part of
one that has failed. Moments of two ranks are possible together if neither has left an exchange that the other has not
entered. Only exchanges of starts and commits are counted, so pairs that the collectives of training would exclude are
checked too.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from durable.drive import Drive, Files, Found, subsets
from durable.recorder import Committed, Enter, Leave, Log, Returned, Sync, Write
from infinity.durable.choose import Seen, choose
from infinity.errors import CheckpointError

RUN = Path("run")


@dataclass(frozen=True)
class Moment:
    """A moment at which a rank may lose power: before its event `position`.

    entered, left: number of exchanges by kind. committed, returned: last step of these events. found: what a start
    finds, and in how many cuts.
    """

    position: int
    entered: Mapping[str, int]
    left: Mapping[str, int]
    committed: int
    returned: int
    found: Counter[Found]


@dataclass
class Counts:
    """Numbers of checks. cuts: of single ranks. moments: combinations of moments. together: of cuts at these."""

    cuts: int = 0
    moments: int = 0
    together: int = 0
    at_once: int = 0
    """Moments at which the power failed on all ranks at once."""
    steps: Counter[int] = field(default_factory=Counter)
    """Steps lost since the last that returned on any rank → combinations of moments and findings."""


def moments(log: Log, folder: Path, seeded: int, draw: random.Random) -> list[Moment]:
    """The moments of a rank, except those between two writes: the later one may leave the same files."""
    drive, found = Drive(log, folder), Counter[Found]()
    entered, left = dict[str, int](), dict[str, int]()
    committed = returned = 0
    has_changed, moments = True, []
    for position, event in enumerate((*log.events, None)):
        if isinstance(event, Write):
            drive.write(event)
            has_changed = True
            continue
        if has_changed:
            found = Counter(map(drive.found, subsets(drive.since, seeded, draw)))
            has_changed = False
        moments.append(Moment(position, dict(entered), dict(left), committed, returned, found))
        match event:
            case Sync(file):
                drive.sync(file)
                has_changed = True
            case Enter(kind, number):
                entered[kind] = number
            case Leave(kind, number):
                left[kind] = number
            case Committed(step):
                committed = max(step, committed)
            case Returned(step):
                returned = max(step, returned)
    return moments


def are_possible(chosen: Sequence[Moment]) -> bool:
    """Return whether ranks can lose power at these moments, one of each."""
    return all(
        other.entered.get(kind, 0) >= number for one in chosen for other in chosen for kind, number in one.left.items()
    )


def at_once(logs: Sequence[Log], order: bytes) -> Iterator[tuple[int, ...]]:
    """The positions of all ranks at each moment of the run. order: the rank of each event."""
    positions = [0] * len(logs)
    for rank in order:
        if not isinstance(logs[rank].events[positions[rank]], Write):
            yield tuple(positions)
        positions[rank] += 1
    yield tuple(positions)


@cache
def step_of(found: tuple[Found, ...]) -> int:
    """The step from which ranks go on that find these; 0: they begin anew.

    AssertionError if they refuse to start, differ in their step, or find other bytes.
    """
    size = len(found)
    seen = [
        {1: Seen(size, {rank: each.numbers}, True, (rank,) if each.is_damaged else ())}
        for rank, each in enumerate(found)
    ]
    try:
        source, is_same = choose(size, seen, RUN)
    except CheckpointError as error:
        raise AssertionError(f"{error}: {found}") from error
    if source is None:
        return 0
    assert is_same
    steps = {dict(each.whole).get(source.number) for each in found}
    assert len(steps) == 1 and None not in steps, f"commit {source.number} is not whole: {found}"
    return next(step for step in steps if step is not None)


def replay(logs: Sequence[Log], folder: Path, *, seeded: int, seed: int) -> Counts:
    """Check all power cuts. folder: for records that are read. seeded, seed: of `subsets`."""
    draw, counts = random.Random(seed), Counts()
    of_ranks = [moments(log, folder, seeded, draw) for log in logs]
    counts.cuts = sum(each.found.total() for own in of_ranks for each in own)
    possible = set()
    for chosen in itertools.product(*of_ranks):
        if are_possible(chosen):
            possible.add(tuple(each.position for each in chosen))
            counts.moments += 1
            counts.together += math.prod(each.found.total() for each in chosen)
            check(chosen, counts)
    if logs[0].order is not None:
        for positions in at_once(logs, logs[0].order.read_bytes()):
            counts.at_once += 1
            shown = tuple(_next_moment(log, position) for log, position in zip(logs, positions, strict=True))
            assert shown in possible, f"{shown} happened, and the exchanges of ranks exclude it"
    return counts


def check(chosen: Sequence[Moment], counts: Counts) -> None:
    """Assert that no cut at these moments loses a step that any rank has seen as committed, or more than promised."""
    committed, returned = max(each.committed for each in chosen), max(each.returned for each in chosen)
    for found in itertools.product(*(each.found for each in chosen)):
        try:
            step = step_of(found)
        except AssertionError as error:
            raise AssertionError(f"{error} at {[each.position for each in chosen]}") from None
        where = f"at {[each.position for each in chosen]}, where step {returned} had returned: {found}"
        assert step >= committed, f"committed step {committed} is lost, and {step} found, {where}"
        assert step >= returned - 1, f"step {step} is found {where}"
        counts.steps[max(0, returned - step)] += 1


def _next_moment(log: Log, position: int) -> int:
    """The position of the moment that stands for one between two writes."""
    while position < len(log.events) and isinstance(log.events[position], Write):
        position += 1
    return position


def files_at(log: Log, position: int, folder: Path, draw: random.Random) -> Files:
    """The files of a rank after a power cut before an event, with drawn ones of the writes that were not synced."""
    drive = Drive(log, folder)
    for event in log.events[:position]:
        if isinstance(event, Write):
            drive.write(event)
        elif isinstance(event, Sync):
            drive.sync(event.file)
    kept = list(subsets(drive.since, 8, draw))
    return drive.left(draw.choice(kept))
