"""Finds the fastest setting of the I/O engine on a drive, and the cheapest among equals. Pure, except for the arguments
`measure` and `clock`.

Successive halving: three stages, each of which measures fewer settings for longer. Within a stage, every round measures
all settings, in a random order that is reversed in the next round. A drive that slows down, or load from other
processes, therefore affects all settings alike. Settings are ranked by the median over the rounds of the current stage
only, so that luck in an earlier stage has no further effect.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from infinity.cli.drive.measure import OPS, Op, Sample, Workload

TOLERANCE = 0.03
"""Settings slower than the fastest by at most this fraction count as equally fast."""

TILE_BYTES = 10 << 20
"""Bytes of one request of a mixed workload: a tile of 1 Mi elements in bf16 training, remainder and fp32 moments."""

_WEIGHTS: Mapping[Op, float] = {"mixed": 2, "read": 1, "write": 1}
_OVERHEAD_S = 0.05
"""Overhead of a measurement: opening and closing an engine, and computing the expected bytes."""
_SMALLEST_LIMIT = 8 << 20


@dataclass(frozen=True, order=True)
class Setting:
    """A setting of the I/O engine. threads: per folder. engine: "libaio" or "io_uring"."""

    threads: int
    queue_depth: int
    block_size: int
    engine: str

    @property
    def in_flight(self) -> int:
        """Bytes in the full queues of one folder."""
        return self.block_size * self.queue_depth * self.threads

    def workload(self, op: Op) -> Workload:
        request = TILE_BYTES if op == "mixed" else 0
        return Workload(op, self.block_size, self.queue_depth, self.threads, self.engine, request)


@dataclass(frozen=True)
class Space:
    """The values to try, each tuple ascending."""

    blocks: tuple[int, ...] = tuple(size << 10 for size in (128, 256, 512, 1024, 2048, 4096))
    depths: tuple[int, ...] = (4, 8, 16, 32, 64)
    threads: tuple[int, ...] = (1, 2)
    engines: tuple[str, ...] = ("libaio",)
    grants: Mapping[tuple[str, int, int], int] = field(default_factory=dict, hash=False)
    """(engine, threads, queue depth) → smaller depth granted by the system; 0 if the engine does not work."""

    def settings(self, limit: int) -> list[Setting]:
        """Return all distinct granted settings with at most `limit` bytes in flight."""
        every = itertools.product(self.threads, self.depths, self.blocks, self.engines)
        granted = dict.fromkeys(self.granted(setting) for setting in itertools.starmap(Setting, every))
        return [setting for setting in granted if 0 < setting.in_flight <= limit]

    def granted(self, setting: Setting) -> Setting:
        asked = setting.engine, setting.threads, setting.queue_depth
        return replace(setting, queue_depth=self.grants.get(asked, setting.queue_depth))


@dataclass
class Result:
    """Samples of one setting in one stage."""

    setting: Setting
    samples: dict[Op, list[Sample]] = field(default_factory=dict)

    def gb_per_s(self, op: Op) -> float | None:
        """Return the median over the rounds; None if `op` was not measured."""
        return median(sample.gb_per_s for sample in self.samples[op]) if self.samples.get(op) else None

    @property
    def speed(self) -> float:
        """GB/s over all measured operations: the harmonic mean, since times add up, with mixed counted twice."""
        measured = [op for op in OPS if self.samples.get(op)]
        seconds = sum(_WEIGHTS[op] / (self.gb_per_s(op) or 0) for op in measured)
        return sum(_WEIGHTS[op] for op in measured) / seconds

    @property
    def cpu_s_per_gb(self) -> float:
        """Mean over the measured operations of their medians."""
        costs = [median(sample.cpu_s_per_gb for sample in samples) for samples in self.samples.values() if samples]
        return sum(costs) / len(costs)

    @property
    def rounds(self) -> int:
        return min(len(samples) for samples in self.samples.values())


@dataclass(frozen=True)
class Stage:
    """A stage of the search: uses `share` of the time for at most `keep` settings, each measured for `window` seconds
    per operation and round."""

    name: str
    share: float
    ops: tuple[Op, ...]
    window: float
    rounds: int
    """Largest number of rounds."""
    keep: int | None = None


STAGES = (
    Stage("all settings", 0.45, ("mixed",), 0.08, rounds=5),
    Stage("the better ones", 0.3, OPS, 0.1, rounds=7, keep=8),
    Stage("finalists", 0.25, OPS, 0.15, rounds=15, keep=6),
)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a search.

    results: the last result of each setting, sorted by stage reached, then by speed. first: the first result of each,
    which are comparable, since nearly all are of the first stage.
    """

    best: Setting
    results: list[Result]
    first: list[Result]
    baseline: Setting


Measure = Callable[[Setting, Op, float], Sample]
"""Measures (setting, operation, seconds)."""

Follow = Callable[[Stage, int, Sequence[Result]], None]
"""Called before each measurement with the stage, its number of settings, and its results so far."""


def search(
    space: Space,
    measure: Measure,
    *,
    baseline: Setting,
    limit: int,
    seconds: float,
    clock: Callable[[], float],
    follow: Follow = lambda stage, settings, results: None,
) -> Outcome:
    """Measure settings of `space` and the baseline, and return the outcome.

    seconds: no measurement starts later, except the first of `baseline`. limit: largest number of bytes in flight.
    """
    begin, spent = clock(), 0.0
    all_settings = [setting for setting in space.settings(limit) if setting != baseline]
    entered = [baseline, *thinned(space, limit, baseline, affordable(STAGES[0], seconds))]
    best, first, latest = baseline, dict[Setting, Result](), dict[Setting, tuple[int, Result]]()
    for number, stage in enumerate(STAGES):
        spent += stage.share
        results = _take_turns(stage, entered, measure, begin + spent * seconds, clock, follow)
        if not results:
            break
        for result in results:
            first.setdefault(result.setting, result)
            latest[result.setting] = number, result
        best = choose(results).setting
        if stage is not STAGES[-1]:
            follower = STAGES[number + 1]
            room = min(follower.keep or len(results), affordable(follower, seconds))
            tried, entered = entered, [result.setting for result in survivors(results, room)]
            if stage is STAGES[0]:
                near = itertools.chain.from_iterable(neighbours(one, space, all_settings) for one in entered[:3])
                new = [setting for setting in dict.fromkeys(near) if setting not in tried][: room // 2]
                entered = entered[: room - len(new)] + new
    ordered = sorted(latest.values(), key=lambda each: (-each[0], -each[1].speed))
    return Outcome(best, [result for _, result in ordered], list(first.values()), baseline)


def choose(results: Sequence[Result], tolerance: float = TOLERANCE) -> Result:
    """Return the cheapest result within `tolerance` of the fastest, by threads, then bytes in flight, then CPU time."""
    fastest = max(result.speed for result in results)
    return min((result for result in results if result.speed >= (1 - tolerance) * fastest), key=_cost)


def survivors(results: Sequence[Result], keep: int) -> list[Result]:
    """Return at most `keep` results, those most likely to be chosen in the end.

    Picks in turn the fastest of the remaining results, and those that `choose` selects with `TOLERANCE` and with twice
    that. Many equally fast settings thus cannot displace the cheap ones, nor many cheap ones the fast.
    """
    left, selected = list(results), list[Result]()
    tolerances = itertools.cycle((0.0, TOLERANCE, 2 * TOLERANCE))
    while left and len(selected) < keep:
        selected.append(choose(left, next(tolerances)))
        left = [result for result in left if result is not selected[-1]]
    return selected


def unrest(results: Sequence[Result]) -> float:
    """Return (max - min) / median over the rounds of a setting, as the median over settings and operations.

    Close to 0 if the drive is steady and nothing else uses it.
    """
    spreads = [0.0]
    for result in results:
        for samples in result.samples.values():
            speeds = [sample.gb_per_s for sample in samples]
            if len(speeds) > 1:
                spreads.append((max(speeds) - min(speeds)) / median(speeds))
    return median(spreads[1:] or spreads)


def in_flight_limit(gb_per_s: float, size: int) -> int:
    """Return the largest useful number of bytes in flight, a power of two. A deeper queue adds latency, no throughput.

    It is bounded by 50 ms at `gb_per_s`, and by a quarter of the half of the file that mixed work reads or writes.
    """
    bound = min(gb_per_s * 1e9 * 0.05, size / 8)
    return max(_SMALLEST_LIMIT, 1 << max(0, int(bound)).bit_length() - 1)


def affordable(stage: Stage, seconds: float) -> int:
    """Return how many settings fit the stage's time if half of them are measured twice; at least 2."""
    each = 1.5 * len(stage.ops) * (stage.window + _OVERHEAD_S)
    return max(2, int(stage.share * seconds / each))


def thinned(space: Space, limit: int, baseline: Setting, count: int) -> list[Setting]:
    """Return about `count` settings of `space`, without the baseline; drops every second value if there are more.

    Dropped settings near the best one are tried later; see `neighbours`.
    """
    while True:
        settings = [setting for setting in space.settings(limit) if setting != baseline]
        if len(settings) <= count:
            return settings
        axes: list[tuple[int, str]] = [(len(space.depths), "depths"), (len(space.blocks), "blocks")]
        length, longest = max(axes)
        if length <= 2:
            return settings[:: -(-len(settings) // count)]
        space = replace(space, **{longest: getattr(space, longest)[1 - length % 2 :: 2]})


def neighbours(setting: Setting, space: Space, among: Sequence[Setting]) -> list[Setting]:
    """Return settings of `among` that are one step of `space` from `setting` in block size, queue depth or both."""

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
    """Return the results of the settings measured with every operation of the stage before the deadline."""
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
