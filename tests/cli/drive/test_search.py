"""The search finds the fastest setting through noise, prefers the cheap among equals, and ends in time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from infinity.cli.drive.measure import OPS, Op, Sample
from infinity.cli.drive.search import (
    STAGES,
    Outcome,
    Result,
    Setting,
    Space,
    affordable,
    choose,
    in_flight_limit,
    neighbours,
    search,
    survivors,
    thinned,
    unrest,
)

MIB = 1 << 20
BASELINE = Setting(1, 32, MIB, "libaio")
NO_LIMIT = 1 << 40


def sample(gb_per_s: float, cpu: float = 0.01) -> Sample:
    return Sample(10**9, 1 / gb_per_s, cpu, (), "libaio (static)", 32)


def result(
    *speeds: float, threads: int = 1, depth: int = 8, block: int = MIB, engine: str = "libaio", cpu: float = 0.01
) -> Result:
    return Result(Setting(threads, depth, block, engine), {"mixed": [sample(speed, cpu) for speed in speeds]})


class Drive:
    """A clock, and a drive of given speed; each measurement takes its window plus a little."""

    def __init__(self, gb_per_s: Callable[[Setting, Op], float], overhead: float = 0.02) -> None:
        self.now = 100.0
        self.measured: list[tuple[float, Setting, Op]] = []
        self._gb_per_s, self._overhead = gb_per_s, overhead

    def clock(self) -> float:
        return self.now

    def measure(self, setting: Setting, op: Op, seconds: float) -> Sample:
        self.measured.append((self.now, setting, op))
        self.now += seconds + self._overhead
        return sample(self._gb_per_s(setting, op))

    def search(self, space: Space, seconds: float, limit: int = NO_LIMIT) -> Outcome:
        return search(space, self.measure, baseline=BASELINE, limit=limit, seconds=seconds, clock=self.clock)


def saturating(setting: Setting, op: Op) -> float:
    """Return a speed that grows with the bytes in flight up to 16 MiB; a second thread adds nothing."""
    full = {"read": 4.0, "write": 9.0, "mixed": 5.5}[op]
    return full * min(1.0, 0.4 + 0.6 * setting.block_size * setting.queue_depth / (16 * MIB))


# choose


def test_the_fastest_is_chosen_where_it_is_clearly_faster() -> None:
    slow, fast = result(4.0, depth=4), result(5.0, threads=4, depth=64)
    assert choose([slow, fast]) is fast


def test_of_equals_the_one_with_fewer_threads_then_less_in_flight_then_less_cpu() -> None:
    dear = result(5.0, threads=2)
    deep = result(4.99, depth=32)
    busy = result(4.98, depth=8, cpu=0.02)
    cheap = result(4.86, depth=8, engine="io_uring", cpu=0.01)
    assert choose([dear, deep]) is deep
    assert choose([dear, deep, busy]) is busy
    assert choose([dear, deep, busy, cheap]) is cheap
    assert choose([dear, deep, busy, result(4.84, depth=4)]) is busy  # more than 3 % slower


def test_a_tie_in_everything_does_not_depend_on_the_order() -> None:
    tied = [result(5.0, engine="io_uring"), result(5.0, engine="libaio")]
    assert choose(tied).setting == choose(tied[::-1]).setting


def test_one_lucky_round_does_not_win() -> None:
    lucky = result(5.0, 5.0, 9.9, 5.0, 4.9, threads=2)
    assert choose([result(5.0, 5.1, 4.9), lucky]).setting.threads == 1


def test_the_speed_of_several_operations_is_that_of_the_time_they_take() -> None:
    both = Result(BASELINE, {"mixed": [sample(4.0)], "read": [sample(2.0)], "write": [sample(8.0)]})
    assert both.speed == pytest.approx(4 / (2 / 4 + 1 / 2 + 1 / 8))
    assert Result(BASELINE, {"read": [sample(2.0)]}).speed == pytest.approx(2.0)


# survivors


def test_the_fastest_and_the_cheap_survive() -> None:
    crowd = [result(5.0 + n / 1000, threads=4, depth=n + 1) for n in range(20)]
    cheap, hopeless = result(4.95), result(2.0, depth=1)
    kept = survivors([*crowd, cheap, hopeless], 4)
    assert len(kept) == 4 and kept[0] is crowd[-1] and cheap in kept and hopeless not in kept
    assert len({id(one) for one in kept}) == 4
    assert len(survivors(crowd[:2], 4)) == 2


def test_unrest_is_how_far_rounds_are_apart() -> None:
    assert unrest([result(5.0), result(4.0)]) == 0
    assert unrest([result(5.0, 5.0, 4.0), result(4.0, 4.0), result(3.0, 2.0, 1.0)]) == pytest.approx(0.2)


# the settings that are tried


def test_no_more_in_flight_than_the_limit() -> None:
    space = Space()
    assert len(space.settings(NO_LIMIT)) == 6 * 5 * 2
    assert {setting.in_flight <= 16 * MIB for setting in space.settings(16 * MIB)} == {True}


@pytest.mark.parametrize("count", [1, 2, 7, 20, 59])
def test_thinned_settings_are_few_and_spread(count: int) -> None:
    space = Space()
    found = thinned(space, NO_LIMIT, BASELINE, count)
    assert 1 <= len(found) <= count
    assert BASELINE not in found and len(set(found)) == len(found)
    assert set(found) <= set(space.settings(NO_LIMIT))


def test_neighbours_are_one_step_away() -> None:
    space = Space()
    everything = space.settings(NO_LIMIT)
    near = neighbours(Setting(1, 16, MIB, "libaio"), space, everything)
    assert {setting.queue_depth for setting in near} == {8, 16, 32}
    assert {setting.block_size for setting in near} == {MIB // 2, MIB, 2 * MIB}
    assert len(near) == 8 and {setting.threads for setting in near} == {1}
    assert len(neighbours(Setting(1, 4, 128 << 10, "libaio"), space, everything)) == 3
    assert neighbours(Setting(1, 1000, 12288, "libaio"), space, everything) == []


def test_settings_that_are_granted_alike_are_one() -> None:
    space = Space(
        depths=(4, 8, 16), threads=(1, 2), grants={("libaio", 1, 16): 8, ("libaio", 2, 16): 4, ("libaio", 2, 8): 4}
    )
    assert {(each.threads, each.queue_depth) for each in space.settings(NO_LIMIT)} == {(1, 4), (1, 8), (2, 4)}
    assert len(space.settings(NO_LIMIT)) == 3 * len(space.blocks)
    assert space.granted(Setting(2, 16, MIB, "libaio")) == Setting(2, 4, MIB, "libaio")
    assert Space(threads=(1,), grants={("libaio", 1, depth): 0 for depth in Space().depths}).settings(NO_LIMIT) == []


def test_the_limit_follows_the_drive_and_the_file() -> None:
    assert in_flight_limit(4.0, 1 << 30) == 128 * MIB
    assert in_flight_limit(1.0, 1 << 30) == 32 * MIB  # 50 ms of 1 GB/s
    assert in_flight_limit(0.05, 1 << 30) == 8 * MIB
    assert in_flight_limit(float("inf"), 256 * MIB) == 32 * MIB


# the search


def test_finds_the_cheapest_of_the_fast_through_noise() -> None:
    for seed in range(10):
        noise = random.Random(seed)

        def measured(setting: Setting, op: Op, noise: random.Random = noise) -> float:
            outlier = 0.5 if noise.random() < 0.1 else 1.0
            return saturating(setting, op) * noise.gauss(1.0, 0.02) * outlier

        best = Drive(measured).search(Space(engines=("libaio", "io_uring")), 60).best
        assert best.threads == 1
        assert saturating(best, "mixed") > 0.95 * 5.5


@pytest.mark.parametrize("seconds", [0.1, 1.0, 5.0, 60.0])
def test_nothing_is_measured_after_the_time_is_up(seconds: float) -> None:
    drive = Drive(saturating)
    found = drive.search(Space(threads=(1, 2, 4), engines=("libaio", "io_uring")), seconds)
    assert max(when for when, _, _ in drive.measured) < 100 + seconds
    assert found.best in {result.setting for result in found.results}
    assert len(drive.measured) == 1 or drive.measured[0][1] == BASELINE


def test_a_drive_too_slow_for_the_time_leaves_the_baseline() -> None:
    drive = Drive(saturating, overhead=50.0)
    found = drive.search(Space(), 10)
    assert found.best == BASELINE and [result.setting for result in found.results] == [BASELINE]
    assert len(drive.measured) == 1


def test_the_baseline_is_measured_even_without_time() -> None:
    assert Drive(saturating).search(Space(), -1.0).best == BASELINE


def test_settings_take_turns() -> None:
    drive = Drive(saturating)
    drive.search(Space(), 60)
    order = [setting for _, setting, _ in drive.measured]
    first = len(dict.fromkeys(order))
    assert order[first : 2 * first] == order[first - 1 :: -1]


def test_a_drive_that_slows_down_does_not_decide() -> None:
    drive = Drive(saturating)
    drive._gb_per_s = lambda setting, op: saturating(setting, op) * (1 - 0.3 * (drive.now - 100) / 60)
    best = drive.search(Space(), 60).best
    assert best.threads == 1 and saturating(best, "mixed") > 0.95 * 5.5


def test_a_short_search_looks_around_what_it_found() -> None:
    space, seconds = Space(), 8.0
    drive = Drive(saturating)
    drive.search(space, seconds)
    tried = {setting for _, setting, _ in drive.measured}
    thin = thinned(space, NO_LIMIT, BASELINE, affordable(STAGES[0], seconds))
    assert len(thin) < len(space.settings(NO_LIMIT)) - 1
    assert tried - set(thin) - {BASELINE}


def test_finalists_come_first_with_every_operation_measured() -> None:
    found = Drive(saturating).search(Space(), 60)
    final = found.results[: STAGES[-1].keep]
    assert found.best in [result.setting for result in final]
    assert all(result.gb_per_s(op) is not None for result in final for op in OPS)
    assert [result.speed for result in final] == sorted((result.speed for result in final), reverse=True)
    assert len({result.setting for result in found.results}) == len(found.results)


def test_first_figures_are_of_every_setting_and_of_one_stage() -> None:
    space = Space()
    first = Drive(saturating).search(space, 60).first
    assert {result.setting for result in first} == set(space.settings(NO_LIMIT)) | {BASELINE}
    assert {tuple(result.samples) for result in first} == {("mixed",)}
