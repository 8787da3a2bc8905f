"""Finds the setting of the I/O engine that is fastest on a drive, and the cheapest among equals.  Pure, but for the
measuring and the clock it is handed.

Successive halving: three stages, each of which measures fewer settings for longer.  Within a stage the settings take
turns, round after round, in an order that is drawn for every second round and turned around for the next, so that a
drive that slows down or a neighbour that is busy meets all of them; what counts is the median over the rounds.  A stage
judges by its own figures alone: a setting that was lucky in an earlier one brought nothing but its place in the next.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from infinity.cli.drive.measure import OPS, Op, Sample, Workload

TOLERANCE = 0.03
"""Settings that are slower by less than this part are as good as the fastest."""

TILE_BYTES = 10 << 20
"""Of one request of a mixed workload: an update's tile of 1 Mi elements in bf16 training, remainder and moments."""

_WEIGHTS: Mapping[Op, float] = {"mixed": 2, "read": 1, "write": 1}
_OVERHEAD_S = 0.05
"""Of a measurement: opening and closing an engine, and computing what will be read."""
_SMALLEST_LIMIT = 8 << 20


@dataclass(frozen=True, order=True)
class Setting:
    """`threads` are those of each folder; `engine` is "libaio" or "io_uring"."""

    threads: int
    queue_depth: int
    block_size: int
    engine: str

    @property
    def in_flight(self) -> int:
        """Bytes that the queues of one folder hold."""
        return self.block_size * self.queue_depth * self.threads

    def workload(self, op: Op) -> Workload:
        request = TILE_BYTES if op == "mixed" else 0
        return Workload(op, self.block_size, self.queue_depth, self.threads, self.engine, request)


@dataclass(frozen=True)
class Space:
    """The values that are tried, each ascending."""

    blocks: tuple[int, ...] = tuple(size << 10 for size in (128, 256, 512, 1024, 2048, 4096))
    depths: tuple[int, ...] = (4, 8, 16, 32, 64)
    threads: tuple[int, ...] = (1, 2)
    engines: tuple[str, ...] = ("libaio",)
    grants: Mapping[tuple[str, int, int], int] = field(default_factory=dict, hash=False)
    """Of engine, threads and queue depth: the depth that the system grants where that is less; 0: no engine at all."""

    def settings(self, limit: int) -> list[Setting]:
        """All of them as the system grants them, each once, but none with more than `limit` bytes in flight."""
        every = itertools.product(self.threads, self.depths, self.blocks, self.engines)
        granted = dict.fromkeys(self.granted(setting) for setting in itertools.starmap(Setting, every))
        return [setting for setting in granted if 0 < setting.in_flight <= limit]

    def granted(self, setting: Setting) -> Setting:
        asked = setting.engine, setting.threads, setting.queue_depth
        return replace(setting, queue_depth=self.grants.get(asked, setting.queue_depth))


@dataclass
class Result:
    """What was measured of one setting, in one stage."""

    setting: Setting
    samples: dict[Op, list[Sample]] = field(default_factory=dict)

    def gb_per_s(self, op: Op) -> float | None:
        """The median over the rounds; None where it was not measured."""
        return median(sample.gb_per_s for sample in self.samples[op]) if self.samples.get(op) else None

    @property
    def speed(self) -> float:
        """GB/s of the operations measured together: the harmonic mean, since times add, with mixed counted twice."""
        measured = [op for op in OPS if self.samples.get(op)]
        seconds = sum(_WEIGHTS[op] / (self.gb_per_s(op) or 0) for op in measured)
        return sum(_WEIGHTS[op] for op in measured) / seconds

    @property
    def cpu_s_per_gb(self) -> float:
        """The mean of the medians of the operations measured."""
        costs = [median(sample.cpu_s_per_gb for sample in samples) for samples in self.samples.values() if samples]
        return sum(costs) / len(costs)

    @property
    def rounds(self) -> int:
        return min(len(samples) for samples in self.samples.values())


@dataclass(frozen=True)
class Stage:
    """`share` of the time goes to `keep` settings at most, measured for `window` seconds an operation and round."""

    name: str
    share: float
    ops: tuple[Op, ...]
    window: float
    rounds: int
    """At most."""
    keep: int | None = None


STAGES = (
    Stage("all settings", 0.45, ("mixed",), 0.08, rounds=5),
    Stage("the better ones", 0.3, OPS, 0.1, rounds=7, keep=8),
    Stage("finalists", 0.25, OPS, 0.15, rounds=15, keep=6),
)


@dataclass(frozen=True)
class Outcome:
    """`results`: the last figures of each setting, those that came further first, and of these the fastest first.

    `first`: the first figures of each, nearly all of one stage, to be compared with each other.
    """

    best: Setting
    results: list[Result]
    first: list[Result]
    baseline: Setting


Measure = Callable[[Setting, Op, float], Sample]
"""Of a setting and an operation, for so many seconds."""

Follow = Callable[[Stage, int, Sequence[Result]], None]
"""Told before each measurement: the stage, its number of settings, and what it has found so far."""


def search(
    space: Space,
    measure: Measure,
    *,
    baseline: Setting,
    limit: int,
    seconds: float,
    clock: Callable[[], float],
    follow: Follow = lambda stage, settings, found: None,
) -> Outcome:
    """Measure settings of `space` and the baseline.

    No measurement starts after `seconds`, but `baseline` is measured in any case. `limit`: bytes in flight, at most.
    """
    begin, spent = clock(), 0.0
    all_settings = [setting for setting in space.settings(limit) if setting != baseline]
    entered = [baseline, *thinned(space, limit, baseline, affordable(STAGES[0], seconds))]
    best, first, latest = baseline, dict[Setting, Result](), dict[Setting, tuple[int, Result]]()
    for number, stage in enumerate(STAGES):
        spent += stage.share
        found = _take_turns(stage, entered, measure, begin + spent * seconds, clock, follow)
        if not found:
            break
        for result in found:
            first.setdefault(result.setting, result)
            latest[result.setting] = number, result
        best = choose(found).setting
        if stage is not STAGES[-1]:
            follower = STAGES[number + 1]
            room = min(follower.keep or len(found), affordable(follower, seconds))
            tried, entered = entered, [result.setting for result in survivors(found, room)]
            if stage is STAGES[0]:
                near = itertools.chain.from_iterable(neighbours(one, space, all_settings) for one in entered[:3])
                new = [setting for setting in dict.fromkeys(near) if setting not in tried][: room // 2]
                entered = entered[: room - len(new)] + new
    ordered = sorted(latest.values(), key=lambda each: (-each[0], -each[1].speed))
    return Outcome(best, [result for _, result in ordered], list(first.values()), baseline)


def choose(results: Sequence[Result], tolerance: float = TOLERANCE) -> Result:
    """The cheapest of those that are as good as the fastest: fewer threads, fewer bytes in flight, less CPU."""
    fastest = max(result.speed for result in results)
    return min((result for result in results if result.speed >= (1 - tolerance) * fastest), key=_cost)


def survivors(results: Sequence[Result], keep: int) -> list[Result]:
    """At most `keep`, those with the best chances to be chosen: by turns the fastest of what is left, and the one that
    would be chosen of it, were the figures true to `TOLERANCE` or to twice that. So a crowd of equals does not push the
    cheap out, nor a crowd of cheap and slow ones the fast."""
    left, kept = list(results), list[Result]()
    tolerances = itertools.cycle((0.0, TOLERANCE, 2 * TOLERANCE))
    while left and len(kept) < keep:
        kept.append(choose(left, next(tolerances)))
        left = [result for result in left if result is not kept[-1]]
    return kept


def unrest(results: Sequence[Result]) -> float:
    """How far apart the rounds of one setting are, as a part of their median; the median over settings and operations.
    Next to 0 where the drive is steady and nothing else uses it."""
    spreads = [0.0]
    for result in results:
        for samples in result.samples.values():
            speeds = [sample.gb_per_s for sample in samples]
            if len(speeds) > 1:
                spreads.append((max(speeds) - min(speeds)) / median(speeds))
    return median(spreads[1:] or spreads)


def in_flight_limit(gb_per_s: float, size: int) -> int:
    """Bytes in flight worth trying, a power of two: what the drive moves in 50 ms at `gb_per_s`, and a quarter of the
    half of the file that mixed work reads or writes.  A deeper queue adds waiting and no speed."""
    bound = min(gb_per_s * 1e9 * 0.05, size / 8)
    return max(_SMALLEST_LIMIT, 1 << max(0, int(bound)).bit_length() - 1)


def affordable(stage: Stage, seconds: float) -> int:
    """How many settings the stage has the time to measure once, and half of them twice; two at least."""
    each = 1.5 * len(stage.ops) * (stage.window + _OVERHEAD_S)
    return max(2, int(stage.share * seconds / each))


def thinned(space: Space, limit: int, baseline: Setting, count: int) -> list[Setting]:
    """Settings of `space` but the baseline: about `count` of them, every second value left out where all are more.

    What was left out near the best is tried later, see `neighbours`.
    """
    while True:
        found = [setting for setting in space.settings(limit) if setting != baseline]
        if len(found) <= count:
            return found
        axes: list[tuple[int, str]] = [(len(space.depths), "depths"), (len(space.blocks), "blocks")]
        length, longest = max(axes)
        if length <= 2:
            return found[:: -(-len(found) // count)]
        space = replace(space, **{longest: getattr(space, longest)[1 - length % 2 :: 2]})


def neighbours(setting: Setting, space: Space, among: Sequence[Setting]) -> list[Setting]:
    """Settings of `among` that are one step of `space` away from `setting` in block size, queue depth or both."""

    def steps(values: tuple[int, ...], value: int) -> set[int]:
        if value not in values:
            return {value}
        where = values.index(value)
        return set(values[max(0, where - 1) : where + 2])

    blocks, depths = steps(space.blocks, setting.block_size), steps(space.depths, setting.queue_depth)
    alike = (other for other in among if (other.threads, other.engine) == (setting.threads, setting.engine))
    return [other for other in alike if other.block_size in blocks and other.queue_depth in depths and other != setting]


def _cost(result: Result) -> tuple[int, int, float, Setting]:
    return result.setting.threads, result.setting.in_flight, result.cpu_s_per_gb, result.setting


def _take_turns(
    stage: Stage,
    settings: Sequence[Setting],
    measure: Measure,
    deadline: float,
    clock: Callable[[], float],
    follow: Follow,
) -> list[Result]:
    """What is known of those settings that were measured with every operation of the stage before the deadline."""
    results = [Result(setting, {op: [] for op in stage.ops}) for setting in settings]
    drawn = random.Random(len(results))
    order = list(results)
    for turn in range(stage.rounds):
        if turn % 2:
            order.reverse()
        else:
            order[1:] = drawn.sample(order[1:], len(order) - 1)
        for result in order:
            for op in stage.ops:
                if clock() >= deadline and (stage is not STAGES[0] or turn or result is not results[0]):
                    return [result for result in results if result.rounds]
                follow(stage, len(settings), [result for result in results if result.rounds])
                result.samples[op].append(measure(result.setting, op, stage.window))
    return results
