"""Measures the I/O of folders through training's I/O engine, and verifies all bytes.

A bench opens its swap file, writes it once, since training overwrites written files, and allocates its buffers once.
Each run keeps enough requests in flight to fill the engine's queues. Writes go directly from the pattern, without a
copy. Reads are compared when they complete, before their buffer is reused, while later requests keep the queues full.
CPU seconds exclude the comparison.
"""

from __future__ import annotations

import errno
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from infinity.cli.drive.pattern import PAGE, PERIOD, Contents
from infinity.errors import OutOfMemoryError
from infinity.native import _aio
from infinity.plan.io import LARGEST_CHUNK, IoPlan, Stripe
from infinity.tiers.available import available_memory
from infinity.tiers.files import open_swap_files
from infinity.tiers.io import open_engine, striped_by_speed
from infinity.tiers.memory import host_tensor

Op = Literal["read", "write", "mixed"]
OPS: tuple[Op, ...] = ("read", "write", "mixed")

SMALLEST_FILE = 16 << 20
"""Bytes of the file of a search or of several measurements."""
_SMALLEST_REQUEST = 2 << 20
_SECTOR = 512
_UNREAD = 0xEE
"""Byte in each sector of a buffer before a read, which reveals a read that did not happen."""


@dataclass(frozen=True)
class Workload:
    """Parameters of one run. Sizes in bytes; `threads` per folder, as in the config."""

    op: Op
    block_size: int = 1 << 20
    queue_depth: int = 32
    threads: int = 1
    engine: str = "auto"
    request_bytes: int = 0
    """Bytes of one call of the engine; 0: the larger of a block and 2 MiB."""

    @property
    def request(self) -> int:
        """Bytes of one call of the engine."""
        return self.request_bytes or max(self.block_size, _SMALLEST_REQUEST)

    def outstanding(self, folders: int) -> int:
        """Return the number of requests that keeps all queues full: twice their capacity, and at least 4, so that the
        wait for the oldest does not drain the others."""
        return max(4, -(-2 * self.block_size * self.queue_depth * self.threads * folders // self.request))


@dataclass(frozen=True)
class Sample:
    """Result of one run: bytes moved, wall-clock seconds, and CPU seconds of all threads of the process, kernel
    included, without the comparison of reads.

    `latencies`: (milliseconds from submission to completion, number of pieces), ascending; a piece is a block, or the
    rest of a request. `backend`: the engine's name of its backend. `queue_depth`: as granted by the system.
    """

    nbytes: int
    seconds: float
    cpu_seconds: float
    latencies: tuple[tuple[float, int], ...]
    backend: str
    queue_depth: int

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / 1e9 / self.seconds

    @property
    def iops(self) -> float:
        """Pieces per second."""
        return sum(count for _, count in self.latencies) / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_seconds / (self.nbytes / 1e9)


@dataclass(frozen=True)
class _Pending:
    """A request in flight. buffer: that of a read at `offset`; None for a write."""

    request: _aio.Request
    offset: int
    buffer: NDArray[np.uint8] | None = None


_PASS = Workload("write")
"""Workload that lays out and reads back the whole file, outside of measurements."""


def percentile(latencies: Iterable[tuple[float, int]], fraction: float) -> float:
    """Return the milliseconds within which `fraction` of the pieces were done; NaN without pieces.

    latencies: (milliseconds, number of pieces) in any order, also of several runs.
    """
    buckets = sorted(latencies)
    threshold = fraction * sum(count for _, count in buckets)
    done = 0
    for milliseconds, count in buckets:
        done += count
        if count and done >= threshold:
            return milliseconds
    return math.nan


class Bench:
    """A laid-out swap file over `paths`, and buffers for all of `workloads`. A context manager.

    The file is deleted by `close` or when the process ends.

    Raises the errors of `open_swap_files` and `open_engine`, OutOfMemoryError if the buffers do not fit, and OSError
    with path and offset if a transfer fails or a byte differs from the one written.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        size: int,
        workloads: Iterable[Workload],
        *,
        chunk: int = LARGEST_CHUNK,
        weights: Sequence[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """size: bytes of the file, at least two pages. chunk, weights: of the stripe; by default weights by speed, as
        in training. clock: returns seconds; for tests.
        """
        self.paths = [Path(path) for path in paths]
        self.nbytes = size // PAGE * PAGE
        if self.nbytes < 2 * PAGE:
            raise ValueError(f"the file needs at least {2 * PAGE} bytes, not {size}")
        self._clock = clock
        self.verified_bytes = 0
        """Number of bytes read and verified so far."""

        works = [_PASS, *workloads]
        longest = max(self._request(work) for work in works)
        ring = max(self._request(work) * self._outstanding(work) for work in works)
        if available_memory() < ring + PERIOD + longest:
            hint = "lower the block size, the queue depth or the number of threads"
            raise OutOfMemoryError("host memory", ring + PERIOD + longest, available_memory(), hint)
        with ExitStack() as undo:
            self.weights = tuple(weights) or _weights_by_speed(self.paths, self.nbytes, chunk, works[-1])
            self._swap = open_swap_files(self.paths, self.nbytes, name="measurement", chunk=chunk, weights=self.weights)
            undo.callback(self._swap.close)
            self.contents = Contents(self.nbytes, longest)
            self._ring = host_tensor(ring)
            self.layout = self._lay_out()
            self._fastest = self.layout.gb_per_s
            undo.pop_all()

    @property
    def direct(self) -> bool:
        """False if a file system refuses `O_DIRECT`, so that measurements include the page cache."""
        return self._swap.direct

    def run(self, workload: Workload, *, seconds: float | None = None, nbytes: int | None = None) -> Sample:
        """Move `nbytes` bytes, or as many as requests started within `seconds` move, in whole requests, at least one.

        Reads and writes go through the file in order and wrap around. In a mixed workload every second request writes:
        reads cover the first half of the file, writes the second.
        """
        request, slots = self._request(workload), self._outstanding(workload)
        if workload.op != "read":
            self.contents.begin_generation()
        self._expect(workload, nbytes if nbytes is not None else 2e9 * self._fastest * (seconds or 0))
        buffers = self._ring[: request * slots].numpy().reshape(slots, request)
        buffers[:, ::_SECTOR] = _UNREAD
        held: dict[int, int | None] = {}  # slot → expected checksum of its last read
        comparing = 0.0
        started = 0
        with self._open(workload) as engine:
            for memory in (self._ring, self.contents.memory):  # as training does with its pools
                engine.register(memory.data_ptr(), memory.numel())
            begin, cpu = self._clock(), time.process_time()

            def more() -> bool:
                if nbytes is not None:
                    return started < nbytes
                return seconds is not None and self._clock() - begin < seconds

            pending: deque[_Pending] = deque()
            turns = self._turns(workload.op, request)
            while not started or more():
                if len(pending) == slots:
                    oldest = pending.popleft()
                    oldest.request.wait()
                    since = time.thread_time()
                    self._check(oldest)
                    comparing += time.thread_time() - since
                writes, number, offset = next(turns)
                if writes:
                    pending.append(_Pending(self._write(engine, offset, request), offset))
                else:
                    slot, since = number % slots, time.thread_time()
                    expected = self.contents.checksum(offset, request)
                    if slot in held and (expected is None or expected == held[slot]):
                        buffers[slot, ::_SECTOR] = _UNREAD  # otherwise a read that did not happen would pass
                    held[slot] = expected
                    comparing += time.thread_time() - since
                    reading = self._read(engine, offset, slot * request, request)
                    pending.append(_Pending(reading, offset, buffers[slot]))
                started += request
            for each in pending:
                each.request.wait()
            spent = self._clock() - begin, max(0.0, time.process_time() - cpu - comparing)
            latencies = tuple(engine.take_latencies())
            sample = Sample(started, *spent, latencies, engine.backend, engine.queue_depth)
        for each in pending:
            self._check(each)
        self._fastest = max(self._fastest, sample.gb_per_s)
        return sample

    def verify(self) -> int:
        """Read the whole file and compare it with the written bytes. Returns its size in bytes."""
        request = self._request(_PASS)
        slots = min(8, self._ring.numel() // request)
        pending: deque[_Pending] = deque()

        def land() -> None:
            oldest = pending.popleft()
            oldest.request.wait()
            self._check(oldest, exactly=True)

        with self._open(_PASS) as engine:
            for number, offset in enumerate(range(0, self.nbytes, request)):
                if len(pending) == slots:
                    land()
                start, length = number % slots * request, min(request, self.nbytes - offset)
                reading = self._read(engine, offset, start, length)
                pending.append(_Pending(reading, offset, self._ring[start : start + length].numpy()))
            while pending:
                land()
        return self.nbytes

    def close(self) -> None:
        self._swap.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lay_out(self) -> Sample:
        """Write the file from its first byte to its last. Returns the measurement."""
        request, slots = self._request(_PASS), self._outstanding(_PASS)
        pending: deque[_aio.Request] = deque()
        with self._open(_PASS) as engine:
            begin, cpu = self._clock(), time.process_time()
            for offset in range(0, self.nbytes, request):
                if len(pending) == slots:
                    pending.popleft().wait()
                pending.append(self._write(engine, offset, min(request, self.nbytes - offset)))
            for each in pending:
                each.wait()
            spent = self._clock() - begin, time.process_time() - cpu
            latencies = tuple(engine.take_latencies())
            return Sample(self.nbytes, *spent, latencies, engine.backend, engine.queue_depth)

    def _turns(self, op: Op, request: int) -> Iterator[tuple[bool, int, int]]:
        """Yield (is a write, number of its kind so far, offset) of each request, without end."""
        half = self.nbytes // 2 // PAGE * PAGE
        regions = {"read": [(False, 0, self.nbytes)], "write": [(True, 0, self.nbytes)]}
        regions["mixed"] = [(False, 0, half), (True, half, self.nbytes - half)]
        number = 0
        while True:
            for writes, start, length in regions[op]:
                yield writes, number, start + number % (length // request) * request
            number += 1

    def _request(self, workload: Workload) -> int:
        """Return the bytes of a request, at most those of the file, or of its half in a mixed workload."""
        return min(workload.request, max(PAGE, self._room(workload.op) // PAGE * PAGE))

    def _outstanding(self, workload: Workload) -> int:
        """Return the number of requests in flight, limited so that no two move the same bytes."""
        fitting = self._room(workload.op) // self._request(workload) * (2 if workload.op == "mixed" else 1)
        return max(1, min(workload.outstanding(len(self.paths)), fitting))

    def _room(self, op: Op) -> int:
        return self.nbytes // 2 if op == "mixed" else self.nbytes

    def _open(self, workload: Workload) -> _aio.Engine:
        threads = workload.threads * len(self.paths)
        return open_engine(
            workload.engine, block_size=workload.block_size, queue_depth=workload.queue_depth, threads=threads
        )

    def _read(self, engine: _aio.Engine, offset: int, start: int, nbytes: int) -> _aio.Request:
        """Start a read. start: byte offset in the ring."""
        return engine.read(self._swap.file, offset, self._ring.data_ptr() + start, nbytes)

    def _write(self, engine: _aio.Engine, offset: int, nbytes: int) -> _aio.Request:
        return engine.write(self._swap.file, offset, self.contents.written(offset, nbytes), nbytes)

    def _expect(self, workload: Workload, nbytes: float) -> None:
        """Compute the expected checksums of a run's reads in advance. nbytes: bytes that the run will move."""
        request = self._request(workload)
        laps = self._room(workload.op) // request
        for _, number, offset in self._turns(workload.op, request):
            if number >= min(laps, nbytes / request) or workload.op == "write":
                break
            self.contents.checksum(offset, request)

    def _check(self, done: _Pending, *, exactly: bool = False) -> None:
        """Compare a read. Raises OSError (EIO) if bytes differ from those written."""
        if done.buffer is None:
            return
        wrong = self.contents.wrong_byte(done.offset, done.buffer, exactly=exactly)
        if wrong is not None:
            text = (
                f"byte {wrong.offset:,} of {self.nbytes:,} was read as {wrong.read:#04x}, but {wrong.expected:#04x} "
                "was written: check this drive (kernel log, smartctl) before you store data on it"
            )
            file, *_ = next(self._swap.stripe.pieces(wrong.offset, 1))
            raise OSError(errno.EIO, text, str(self.paths[file]))
        self.verified_bytes += len(done.buffer)


def _weights_by_speed(paths: Sequence[Path], nbytes: int, chunk: int, work: Workload) -> tuple[int, ...]:
    io = IoPlan(
        folders=tuple(paths),
        nbytes=nbytes,
        passing=0,
        stripe=Stripe(chunk, (1,) * len(paths)),
        engine=work.engine,
        block_size=work.block_size,
        queue_depth=work.queue_depth,
        threads=work.threads * len(paths),
        checksum_block=0,
    )
    return striped_by_speed(io, 1).stripe.weights
