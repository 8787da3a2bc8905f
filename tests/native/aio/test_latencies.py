"""Latencies of pieces: all are counted, in buckets close to the measured time."""

from __future__ import annotations

import time
from typing import Any

from infinity.native import _aio

BLOCK = 4096


def test_every_piece_is_counted_once(store: Any, memory: Any, engine: Any) -> None:
    disk, buffer, io = store(64 * BLOCK), memory(64 * BLOCK), engine(own=True)
    io.write(disk.file, 0, buffer.address, 64 * BLOCK).wait(10)
    io.read(disk.file, 0, buffer.address, 10 * BLOCK).wait(10)
    found = io.take_latencies()
    assert sum(count for _, count in found) == 74
    assert [time for time, _ in found] == sorted(time for time, _ in found)
    assert io.take_latencies() == []


def test_times_are_milliseconds(store: Any, memory: Any, engine: Any, faults: Any) -> None:
    """A delayed piece shows its delay, within the buckets' 2 %."""
    faults({"where": "event", "hold": True, "only": "read"})
    disk, buffer, io = store(2 * BLOCK), memory(2 * BLOCK), engine(own=True)
    began = time.perf_counter()
    request = io.read(disk.file, 0, buffer.address, BLOCK)
    io.write(disk.file, BLOCK, buffer.address + BLOCK, BLOCK).wait(10)  # the thread has begun what came before, too
    io.take_latencies()
    known = time.perf_counter()
    time.sleep(0.05)
    at_least = time.perf_counter() - known
    while _aio._release_held() == 0:
        pass
    request.wait(10)
    at_most = time.perf_counter() - began
    ((milliseconds, count),) = io.take_latencies()
    assert count == 1
    assert 0.98 * at_least * 1e3 <= milliseconds <= 1.02 * at_most * 1e3
