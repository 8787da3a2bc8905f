"""The bench moves the bytes it reports, keeps queues full, and detects wrong bytes and lost writes."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from infinity.cli.drive import measure
from infinity.cli.drive.measure import OPS, Bench, Op, Workload, percentile
from infinity.cli.drive.pattern import PAGE, PERIOD, Contents
from infinity.errors import OutOfMemoryError, OutOfSpaceError, StorageError
from infinity.native import _aio

MIB = 1 << 20
SIZE = 16 * MIB
WORKS = [Workload(op, block_size=256 << 10, queue_depth=4) for op in OPS]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench([tmp_path], SIZE, WORKS) as opened:
        yield opened
    assert os.listdir(tmp_path) == []


def flip_byte(bench: Bench, offset: int) -> None:
    descriptor = bench._swap._fds[-1]
    (was,) = os.pread(descriptor, 1, offset)
    os.pwrite(descriptor, bytes([was ^ 0x10]), offset)
    os.fdatasync(descriptor)


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.op)
def test_a_run_moves_what_was_asked_for(bench: Bench, work: Workload) -> None:
    sample = bench.run(work, nbytes=2 * SIZE)
    assert sample.nbytes == 2 * SIZE
    assert sum(pieces for _, pieces in sample.latencies) == 2 * SIZE // work.block_size
    assert sample.gb_per_s > 0 and sample.iops > 0 and sample.cpu_s_per_gb >= 0 and sample.backend
    assert 0 < percentile(sample.latencies, 0.5) <= percentile(sample.latencies, 0.99)
    assert bench.verify() == SIZE
    assert bench.verified_bytes >= SIZE


def test_every_run_that_writes_changes_the_whole_file(bench: Bench) -> None:
    before = os.pread(bench._swap._fds[-1], SIZE, 0)
    bench.run(WORKS[OPS.index("write")], nbytes=SIZE)
    after = os.pread(bench._swap._fds[-1], SIZE, 0)
    same = np.frombuffer(before, np.uint64) == np.frombuffer(after, np.uint64)
    assert not same.any()


@pytest.mark.parametrize("offset", [0, 5 * MIB + 4097, SIZE - 1])
def test_a_wrong_byte_is_found_and_named(bench: Bench, tmp_path: Path, offset: int) -> None:
    flip_byte(bench, offset)
    with pytest.raises(OSError, match=f"byte {offset:,} of") as failure:
        bench.verify()
    assert failure.value.filename == str(tmp_path)


def test_a_run_finds_a_wrong_byte_in_what_it_read(bench: Bench) -> None:
    flip_byte(bench, 4321)
    with pytest.raises(OSError, match="byte 4,321 of"):
        bench.run(WORKS[0], nbytes=2 * MIB)


def test_a_write_that_did_not_happen_is_found(bench: Bench) -> None:
    bench.contents.generations[100] += 1  # as if page 100 had been overwritten
    with pytest.raises(OSError, match=f"byte {100 * PAGE:,} of"):
        bench.verify()


def test_a_read_that_did_not_happen_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.run(WORKS[0], nbytes=SIZE)  # the right bytes are in the buffers now
    monkeypatch.setattr(Bench, "_read", lambda *_: SimpleNamespace(wait=lambda: 0))
    with pytest.raises(OSError, match="was written"):
        bench.run(WORKS[0], nbytes=SIZE)


@pytest.mark.parametrize("op", ["read", "mixed"])
def test_bytes_that_are_wrong_once_early_in_a_run_are_found(op: Op, bench: Bench) -> None:
    _aio._inject([{"where": "event", "only": "read", "flip": True, "after": 20}])
    try:
        with pytest.raises(OSError, match="was written"):
            bench.run(Workload(op, 256 << 10, 4), nbytes=8 * SIZE)
    finally:
        _aio._inject([])
    bench.verify()


def test_a_read_that_does_not_happen_in_a_later_lap_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Workload("read", block_size=256 << 10, queue_depth=32)
    assert bench._outstanding(work) * work.request == SIZE  # each buffer is for one and the same place again and again
    real, calls = Bench._read, count()
    monkeypatch.setattr(
        Bench, "_read", lambda *how: real(*how) if next(calls) < 16 else SimpleNamespace(wait=lambda: 0)
    )
    with pytest.raises(OSError, match="was read as 0xee"):
        bench.run(work, nbytes=4 * SIZE)


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.op)
def test_every_transfer_is_waited_for(work: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their starts, with no more in flight than asked for; a failure of one is raised."""
    started, ended = list[int](), list[int]()
    most = 0

    def late(real: Callable[..., _aio.Request]) -> Callable[..., Any]:
        def start(*how: Any) -> Any:
            nonlocal most
            request, number = real(*how), len(started)
            started.append(number)
            most = max(most, len(started) - len(ended))
            return SimpleNamespace(wait=lambda: (request.wait(), ended.append(number)))

        return start

    for name in ("_read", "_write"):
        monkeypatch.setattr(Bench, name, late(getattr(Bench, name)))
    monkeypatch.setattr(measure, "_PASS", WORKS[0])  # whose requests are more than those in flight
    with Bench([tmp_path], SIZE, WORKS) as bench:
        assert ended == started and most == bench._outstanding(WORKS[0])
        most = 0
        bench.run(work, nbytes=2 * SIZE)
        assert ended == started and most == bench._outstanding(work)
        bench.verify()
        assert ended == started


def test_reads_of_pages_of_several_generations_are_compared(bench: Bench) -> None:
    bench.run(Workload("write", block_size=MIB, request_bytes=3 * MIB), nbytes=6 * MIB)
    work = Workload("read", block_size=MIB, request_bytes=4 * MIB)
    assert bench.contents.checksum(4 * MIB, 4 * MIB) is None
    verified = bench.verified_bytes
    assert bench.run(work, nbytes=SIZE).nbytes == bench.verified_bytes - verified == SIZE
    flip_byte(bench, 7 * MIB)
    with pytest.raises(OSError, match=f"byte {7 * MIB:,} of"):
        bench.run(work, nbytes=SIZE)


def test_comparing_is_not_in_the_cpu_seconds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    spent, check = [100.0], Bench._check

    def dear(*what: object, **how: object) -> None:
        spent[0] += 5.0
        check(*what, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(Bench, "_check", dear)
    for clock in ("thread_time", "process_time"):
        monkeypatch.setattr(time, clock, lambda: spent[0])
    assert bench.run(WORKS[0], nbytes=4 * SIZE).cpu_seconds == 0
    assert spent[0] == 100 + 5 * 4 * SIZE // WORKS[0].request


def test_what_is_read_is_known_before_the_time_runs(bench: Bench) -> None:
    ops: tuple[Op, ...] = ("read", "mixed")
    for op in ops:
        bench._expect(Workload(op), SIZE)
    known = len(bench.contents._checksums)
    for op in ops:
        bench.run(Workload(op), nbytes=2 * SIZE)
    assert known == len(bench.contents._checksums) == SIZE // Workload("read").request


def test_the_queue_depth_is_the_granted_one(bench: Bench) -> None:
    assert bench.run(WORKS[0], nbytes=SIZE).queue_depth == 4
    _aio._inject([{"where": "setup", "error": errno.EAGAIN, "above": 2, "times": -1}])
    try:
        assert bench.run(WORKS[0], nbytes=SIZE).queue_depth == 2
    finally:
        _aio._inject([])


def test_seconds_are_those_of_the_clock(tmp_path: Path) -> None:
    ticks = count()
    with Bench([tmp_path], SIZE, WORKS, clock=lambda: float(next(ticks))) as bench:
        sample = bench.run(WORKS[0], seconds=10)
    # The first tick begins, one comes before each request but the first, the last but one ends it, the last is the end.
    assert sample.nbytes == 10 * WORKS[0].request and sample.seconds == 11
    assert sample.gb_per_s == pytest.approx(sample.nbytes / 11e9)


def test_reads_and_writes_of_mixed_work_stay_apart(bench: Bench) -> None:
    turns = list(islice(bench._turns("mixed", MIB), 64))
    assert [writes for writes, _, _ in turns[:4]] == [False, True, False, True]
    assert {offset for writes, _, offset in turns if not writes} == {n * MIB for n in range(8)}
    assert {offset for writes, _, offset in turns if writes} == {n * MIB for n in range(8, 16)}


@pytest.mark.parametrize("folders", [1, 2])
def test_queues_stay_full(folders: int) -> None:
    for op in OPS:
        cases = (MIB, 32, 1, 0), (4096, 1, 1, 0), (8 * MIB, 8, 4, 0), (MIB, 8, 2, 10 * MIB)
        for block, depth, threads, request in cases:
            work = Workload(op, block, depth, threads, request_bytes=request)
            assert work.outstanding(folders) * work.request >= 2 * block * depth * threads * folders
            assert work.outstanding(folders) >= 4


def test_requests_in_flight_never_overlap(bench: Bench) -> None:
    for op in OPS:
        work = Workload(op, block_size=MIB, queue_depth=4096, request_bytes=3 * MIB)
        assert bench._outstanding(work) * bench._request(work) <= SIZE


def test_striped_over_two_folders(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    work = Workload("mixed", block_size=128 << 10, queue_depth=4)
    with pytest.warns(RuntimeWarning, match="one file system"):
        bench = Bench(folders, SIZE, [work], chunk=128 << 10)
    with bench:
        bench.run(work, nbytes=SIZE)
        bench.verify()
        bench.contents.generations[33] += 1  # the second chunk's second page
        with pytest.raises(OSError, match=f"byte {33 * PAGE:,} of") as failure:
            bench.verify()
        assert failure.value.filename == str(folders[1])
    assert [os.listdir(folder) for folder in folders] == [[], []]


def test_words_of_the_pattern_are_different() -> None:
    pattern = Contents(PAGE, MIB)
    words = pattern.expected(0, PERIOD, 0).view(np.uint64)[::61]  # all would take seconds
    assert len(np.unique(words)) == len(words)
    assert (pattern.expected(PERIOD - PAGE, MIB, 0)[PAGE:] == pattern.expected(0, MIB - PAGE, 0)).all()
    assert pattern.memory.numel() == PERIOD + MIB and pattern.memory.data_ptr() % PAGE == 0


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="at least 8192 bytes"):
        Bench([tmp_path], PAGE, WORKS)
    with pytest.raises(StorageError, match="does not exist"):
        Bench([tmp_path / "none"], SIZE, WORKS)
    with pytest.raises(OutOfSpaceError):
        Bench([tmp_path], 1 << 60, WORKS)
    monkeypatch.setattr(measure, "available_memory", lambda: MIB)
    with pytest.raises(OutOfMemoryError, match="queue depth"):
        Bench([tmp_path], SIZE, WORKS)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, 1.0), (0.5, 1.0), (0.51, 2.0), (0.9, 2.0), (0.99, 8.0), (1.0, 8.0)]
)
def test_percentiles(fraction: float, expected: float) -> None:
    assert percentile([(8.0, 1), (1.0, 3), (2.0, 4), (1.0, 2), (16.0, 0)], fraction) == expected


def test_percentile_of_nothing() -> None:
    assert math.isnan(percentile([], 0.5))


@pytest.mark.parametrize("op", OPS)
def test_a_file_of_two_pages(tmp_path: Path, op: Op) -> None:
    work = Workload(op, block_size=PAGE, queue_depth=1)
    with Bench([tmp_path], 2 * PAGE, [work]) as bench:
        assert bench.run(work, nbytes=10 * PAGE).nbytes >= 10 * PAGE
        bench.verify()
