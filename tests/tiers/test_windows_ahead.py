"""Windows opened ahead: taken once, dropped by writes, and given up for windows that need their buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity.plan.placement import Extent
from infinity.tier_kind import TierKind
from infinity.tiers.base import Window
from infinity.tiers.device import CpuDevice
from infinity.tiers.memory import host_tensor
from infinity.tiers.pool import Pool
from infinity.tiers.read_ahead import WindowsAhead
from support.late_disk import LateSlab
from support.locked import locked

TILE = 4096
EXTENT, OTHER = Extent(TierKind.NVME, 0, 4 * TILE, "states"), Extent(TierKind.NVME, 4 * TILE, TILE, "states of another")


class Bench:
    """A late disk whose tile n is full of n, and a pool of two buffers."""

    def __init__(self) -> None:
        self.disk = LateSlab(5 * TILE)
        for tile in range(5):
            self.disk.slab[tile * TILE : (tile + 1) * TILE] = tile
        self.pool = Pool(host_tensor, {TILE: 2}, name="tiles", poison=CpuDevice().poison)
        self.windows = locked(WindowsAhead, "_dropped")(self._open_window)

    def _open_window(self, *arguments: Any) -> Window | None:
        assert self.windows._access.locked()
        return self.disk.window(*arguments)

    def open(self, tile: int) -> bool:
        return self.windows.open(EXTENT, tile * TILE, TILE, self.pool)

    def take(self, tile: int) -> Window | None:
        return self.windows.take(EXTENT, tile * TILE, TILE)

    def value(self, window: Window | None) -> int:
        assert window is not None
        window.arrived.wait()
        (value,) = torch.unique(window.tensor).tolist()
        window.release()
        return int(value)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_window_is_taken_once(bench: Bench) -> None:
    assert bench.open(2)
    assert bench.value(bench.take(2)) == 2
    assert bench.take(2) is None and not bench.pool.leased


def test_a_window_is_opened_once_and_as_far_as_buffers_go(bench: Bench) -> None:
    assert bench.open(0) and bench.open(0) and bench.open(1)
    assert bench.pool.leased == 2
    assert not bench.open(2)
    assert bench.open(0)


@pytest.mark.parametrize(("start", "nbytes"), [(TILE, TILE), (0, 4 * TILE), (TILE - 1, 2), (2 * TILE - 1, 1)])
def test_a_write_drops_the_windows_that_it_overlaps(start: int, nbytes: int, bench: Bench) -> None:
    bench.open(1)
    bench.windows.forget(EXTENT, start, nbytes)
    assert bench.take(1) is None


@pytest.mark.parametrize(("extent", "start"), [(EXTENT, 0), (EXTENT, 2 * TILE), (OTHER, 0)])
def test_a_write_beside_a_window_leaves_it(extent: Extent, start: int, bench: Bench) -> None:
    bench.open(1)
    bench.windows.forget(extent, start, TILE)
    assert bench.value(bench.take(1)) == 1


def test_a_window_of_another_size_is_not_taken(bench: Bench) -> None:
    bench.open(1)
    assert bench.windows.take(EXTENT, TILE, TILE // 2) is None
    assert bench.windows.give_up(bench.pool) and not bench.pool.leased


def test_buffers_are_given_up_from_the_window_that_was_opened_last(bench: Bench) -> None:
    bench.open(0)
    bench.open(1)
    assert bench.windows.give_up(bench.pool)
    assert bench.take(1) is None
    assert bench.value(bench.take(0)) == 0
    assert not bench.windows.give_up(bench.pool)


def test_buffers_of_dropped_windows_are_given_up_first(bench: Bench) -> None:
    bench.open(0)
    bench.open(1)
    bench.windows.forget(EXTENT, 0, TILE)
    assert bench.windows.give_up(bench.pool)
    assert bench.value(bench.take(1)) == 1


def test_a_buffer_is_given_up_after_its_read(bench: Bench) -> None:
    """Bytes of a read that has not ended would arrive in the next window's buffer."""
    for dropped in (False, True):
        bench.open(0)
        reading = bench.windows._windows[0][0].arrived
        if dropped:
            bench.windows.forget(EXTENT, 0, TILE)
        assert not reading.done()
        assert bench.windows.give_up(bench.pool)
        assert reading.done()


def test_buffers_of_another_pool_stay(bench: Bench) -> None:
    bench.open(0)
    assert not bench.windows.give_up(Pool(host_tensor, {TILE: 1}, name="others"))
    assert bench.value(bench.take(0)) == 0


@pytest.mark.parametrize("dropped", [False, True])
def test_a_failed_read_is_raised_only_if_its_bytes_are_needed(dropped: bool, bench: Bench) -> None:
    bench.disk.failing.add(("read", 0))
    bench.open(0)
    if dropped:
        bench.windows.forget(EXTENT, 0, TILE)
        assert bench.windows.give_up(bench.pool)
    else:
        window = bench.take(0)
        assert window is not None
        with pytest.raises(OSError, match="Input/output"):
            window.arrived.wait()
        window.release()
    assert not bench.pool.leased


def test_close_releases_every_buffer(bench: Bench) -> None:
    bench.open(0)
    bench.open(1)
    bench.windows.forget(EXTENT, 0, TILE)
    bench.windows.drop_all()
    assert not bench.pool.leased
