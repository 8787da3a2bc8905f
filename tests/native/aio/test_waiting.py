"""Waiting: twice, from many threads, with time-outs, across close, without the GIL."""

from __future__ import annotations

import copy
import errno
import gc
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from infinity.native import _aio

NBYTES = 32_768


@pytest.fixture
def held(store: Any, memory: Any, engine: Any, faults: Any) -> Callable[[], tuple[Any, Any]]:
    """held() -> an engine, and a read on it whose last completion is delayed"""

    def make(*more: dict[str, object], own: bool = False) -> tuple[Any, Any]:
        faults({"where": "event", "hold": True}, *more)
        disk, buffer, io = store(NBYTES), memory(NBYTES), engine(own=own)
        request = io.read(disk.file, 0, buffer.address, NBYTES)
        while request.bytes_done < NBYTES - 4096 * (1 + len(more)):
            time.sleep(0.001)
        return io, request

    return make


def test_a_request_knows_when_it_ended(held: Any) -> None:
    """Its times are on the clock of time.perf_counter, however late it is waited for."""
    before = time.perf_counter()
    _, request = held()
    began, ended = request.times
    assert before <= began <= time.perf_counter() and ended is None
    released = time.perf_counter()
    _aio._release_held()
    while not request.done():
        time.sleep(0.001)
    after = time.perf_counter()
    time.sleep(0.01)
    request.wait()
    assert request.times[0] == began
    assert released <= request.times[1] <= after


def test_twice(store: Any, memory: Any, engine: Any) -> None:
    disk, buffer, io = store(NBYTES), memory(NBYTES), engine()
    request = io.read(disk.file, 0, buffer.address, NBYTES)
    assert [request.wait(), request.wait(), request.wait(0)] == [NBYTES] * 3


def test_for_nothing(store: Any, engine: Any) -> None:
    """An empty request is done before any wait, also on a closed engine."""
    disk, io = store(NBYTES), engine(own=True)
    requests = [io.read(disk.file, 0, 0, 0), io.write(disk.file, NBYTES, 0, 0)]
    io.close()
    with ThreadPoolExecutor(8) as pool:
        for request in requests:
            assert request.done()
            assert [*pool.map(request.wait, [None, 0, -1, 0.0, 10] * 4)] == [0] * 20


def test_for_what_is_no_request(store: Any, memory: Any, engine: Any) -> None:
    """Only an engine creates requests; other objects raise TypeError."""
    disk, buffer, io = store(4096), memory(4096), engine()
    request = io.read(disk.file, 0, buffer.address, 4096)
    for bad in (
        lambda: _aio.Request(),
        lambda: _aio.Request(request),
        lambda: copy.copy(request),
        lambda: pickle.dumps(io),
        lambda: _aio.Request.wait(None),
        lambda: _aio.Request.wait(disk.file),
        lambda: _aio.Request.done(7),
        lambda: request.wait("soon"),
        lambda: io.read("a path", 0, buffer.address, 4096),
        lambda: io.read(disk.file, 0.5, buffer.address, 4096),
        lambda: io.read(disk.file, 0, buffer, 4096),
        lambda: io.write(request, 0, buffer.address, 4096),
        lambda: _aio.File.striped([disk.path], 65_536),
        lambda: type("Mine", (_aio.Request,), {})(),
    ):
        with pytest.raises(TypeError):
            bad()
    with pytest.raises(ValueError, match="file is None"):
        io.read(None, 0, buffer.address, 4096)
    assert request.wait(10) == 4096


def test_an_error_twice(store: Any, memory: Any, engine: Any) -> None:
    disk, buffer, io = store(4096), memory(NBYTES), engine()
    request = io.read(disk.file, 0, buffer.address, NBYTES)
    texts = []
    for _ in range(3):
        with pytest.raises(OSError) as caught:
            request.wait()
        texts.append(str(caught.value))
    assert len(set(texts)) == 1
    assert request.done()


def test_from_many_threads(held: Any) -> None:
    _, request = held()
    with ThreadPoolExecutor(8) as pool:
        waits = [pool.submit(request.wait) for _ in range(8)]
        time.sleep(0.05)
        assert not any(wait.done() for wait in waits)
        assert _aio._release_held() == 1
        assert [wait.result(10) for wait in waits] == [NBYTES] * 8


def test_from_many_threads_as_it_ends(store: Any, memory: Any, engine: Any, faults: Any) -> None:
    """Waits that start before, while and after each of many short requests ends all return or raise the same."""
    faults({"where": "event", "error": errno.EIO, "after": 99})
    disk, buffer, io = store(NBYTES), memory(NBYTES), engine(threads=2)

    def said(request: Any) -> int:
        try:
            return int(request.wait(10))
        except OSError as error:
            return -int(error.errno or 0)

    failed = 0
    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            request = io.read(disk.file, 0, buffer.address, NBYTES)
            answers = set(pool.map(said, [request] * 8))
            assert answers in ({NBYTES}, {-errno.EIO})
            failed += answers == {-errno.EIO}
    assert failed == 1


def test_many_threads_start_and_wait(store: Any, memory: Any, scramble: Any, engine: Any, mode: str) -> None:
    nbytes, count = 12_288, 8
    disk, io = store(count * nbytes, mode), engine(queue_depth=4, threads=2)
    source, target = memory(count * nbytes), memory(count * nbytes)
    source[:] = scramble(count * nbytes)

    def work(at: int) -> None:
        for _ in range(10):
            io.write(disk.file, at, source.address + at, nbytes).wait(10)
            io.read(disk.file, at, target.address + at, nbytes).wait(10)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(0, count * nbytes, nbytes)))
    assert target[:] == source[:]


def test_timeout(held: Any) -> None:
    _, request = held()
    for timeout in (0, -1, 0.05, 0.3):
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=f"read of {NBYTES} bytes at offset 0 of .*store0 is still under way"):
            request.wait(timeout)
        assert time.monotonic() - start < max(timeout, 0) + 1
    assert not request.done()
    _aio._release_held()
    assert request.wait(10) == NBYTES


def test_others_run_meanwhile(held: Any) -> None:
    _, request = held()
    waiter = threading.Thread(target=request.wait)
    waiter.start()
    total = sum(range(1_000_000))  # would not go on if the waiter kept the GIL
    assert total and waiter.is_alive()
    _aio._release_held()
    waiter.join(10)
    assert not waiter.is_alive()


def test_a_signal_is_heard(held: Any) -> None:
    """Ctrl-C ends a wait for a disk that does not respond; the request continues."""

    class Interrupted(Exception):
        pass

    def handler(*_: object) -> None:
        raise Interrupted

    _, request = held()
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            request.wait(10)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not request.done()
    _aio._release_held()
    assert request.wait(10) == NBYTES


def test_new_work_reaches_a_thread_with_work_in_flight(held: Any, store: Any, memory: Any) -> None:
    """A transfer that does not end does not keep the thread from starting the next one."""
    io, stuck = held()
    disk, buffer = store(NBYTES), memory(NBYTES)
    assert io.read(disk.file, 0, buffer.address, NBYTES).wait(10) == NBYTES
    assert not stuck.done()


def test_a_fetch_passes_a_burst_of_writes(store: Any, memory: Any, engine: Any) -> None:
    disk, buffer, io = store(16 << 20), memory(16 << 20), engine(queue_depth=2, own=True)
    writes = io.write(disk.file, 4096, buffer.address + 4096, (16 << 20) - 4096)
    assert io.read(disk.file, 0, buffer.address, 4096).wait(10) == 4096
    assert not writes.done()


def test_close_completes_what_is_queued(store: Any, memory: Any, scramble: Any, engine: Any, mode: str) -> None:
    disk, buffer, io = store(1 << 18, mode), memory(1 << 18), engine(queue_depth=2, own=True)
    buffer[:] = values = scramble(1 << 18)
    requests = [io.write(disk.file, at, buffer.address + at, NBYTES) for at in range(0, 1 << 18, NBYTES)]
    io.close()
    assert all(request.done() for request in requests)
    assert disk.content() == values


def test_close_waits_for_what_is_in_flight(held: Any) -> None:
    io, request = held(own=True)
    closer = threading.Thread(target=io.close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    assert not request.done()
    _aio._release_held()
    closer.join(10)
    assert not closer.is_alive()
    assert request.wait(0) == NBYTES


def test_close_completes_failures_too(held: Any) -> None:
    io, request = held({"where": "event", "error": errno.EIO}, own=True)
    threading.Timer(0.05, _aio._release_held).start()
    io.close()
    with pytest.raises(OSError):
        request.wait(0)


def test_closed(store: Any, memory: Any, engine: Any) -> None:
    disk, buffer, io = store(NBYTES), memory(NBYTES), engine(own=True)
    io.close()
    io.close()
    with pytest.raises(RuntimeError, match="closed"):
        io.read(disk.file, 0, buffer.address, NBYTES)


def test_dropping_the_engine_completes_its_work(store: Any, memory: Any, scramble: Any, backend: str) -> None:
    disk, buffer = store(1 << 20), memory(1 << 20)
    buffer[:] = values = scramble(1 << 20)
    io = _aio.Engine(4096, 2, backend=backend)
    request = io.write(disk.file, 0, buffer.address, 1 << 20)
    del io
    gc.collect()
    assert request.done()
    assert request.wait() == 1 << 20
    assert disk.content() == values


def test_a_request_outlives_file_and_reference(store: Any, memory: Any, scramble: Any, engine: Any) -> None:
    disk, buffer, io = store(1 << 20), memory(1 << 20), engine(queue_depth=1, own=True)
    buffer[:] = values = scramble(1 << 20)
    io.write(disk.file, 0, buffer.address, 1 << 20)
    disk.file = None
    gc.collect()
    io.close()
    assert disk.content() == values
