"""The update: a unit's optimizer step, streamed tile by tile, with reads, compute and writes overlapped.

One thread executes jobs in order. It keeps reads of the next tiles in flight while Adam runs on the oldest tile and
finished tiles are written. A buffer is reused once its write has ended.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from infinity import concurrency
from infinity.plan.layout import UnitLayout
from infinity.tiers.transfer import DONE
from infinity.update.job import PlacedUpdate
from infinity.update.stages import Kernel, UpdateStages, WholeKernel
from infinity.update.tiles import RunningJob, TileInFlight, UpdateBuffers
from infinity.update.whole import update_whole


class UpdatePipeline:
    """The thread that updates units."""

    def __init__(self, buffers: UpdateBuffers, kernel: Kernel, whole: WholeKernel = update_whole) -> None:
        self._buffers = buffers
        self._stages = UpdateStages(buffers, kernel, whole)
        self.refused = self._stages.refused  # ranks exchange their number before they raise
        self._submitted = self._ended = 0
        """Numbers of jobs queued and of jobs finished by the thread. Each counter is written by one thread only."""
        self._jobs: concurrency.Queue = concurrency.fifo()
        self._closing = False
        self._waiting: PlacedUpdate | None = None
        self._running: RunningJob | None = None
        self._reading: deque[TileInFlight] = deque()
        self._writing: deque[TileInFlight] = deque()
        self._thread = concurrency.thread(self._run, "infinity-update")
        self._thread.start()

    def submit(self, placed: PlacedUpdate) -> None:
        """Queue an update, or execute it at once if it is small.

        Errors are raised by waits for the job's progress.
        """
        # The update is sure to run from now on, so a commit may wait for its end.
        placed.job.progress.began.keep()
        # For a small unit, waking the thread takes longer than its update.
        if self._is_immediate(placed):
            self._update_now(placed)
            return
        self._submitted += 1
        self._jobs.put(placed)

    def _is_immediate(self, placed: PlacedUpdate) -> bool:
        """True if the job is small and needs no wait, and the thread is idle."""
        gradient = placed.job.gradient
        return (
            self._stages.unit(placed.job.layout).is_immediate
            and self._submitted == self._ended
            and placed.after.done()
            and (placed.arrives is None or placed.arrives.done())
            and (gradient is None or gradient.done())
        )

    def _update_now(self, placed: PlacedUpdate) -> None:
        running = self._stages.open(placed)
        assert running is not None
        while running.tiles:
            item = self._stages.read(running)
            assert item is not None
            self._stages.end(self._stages.compute(item))
        if running.failed is not None and not isinstance(running.failed, Exception):
            raise running.failed  # Ctrl-C in this thread

    @property
    def reads_ahead(self) -> bool:
        """Return whether `read_ahead` begins reads of any unit's states."""
        return self._buffers.tile_pool.nbytes > 0

    def read_ahead(self, layouts: Iterable[UnitLayout]) -> None:
        """Start to read the optimizer states of units whose jobs come next, in this order, into idle buffers of tiles.

        Called by the thread that submits jobs. Does nothing while jobs are under way, which need the buffers.
        """
        # Both counters have one writer each, so comparing them needs no lock.
        if self._submitted != self._ended:
            return
        for layout in layouts:
            if not self._stages.read_ahead(layout):
                return

    def drop_ahead(self) -> None:
        """Release the buffers of states that were read ahead of jobs which never came. Waits for their reads."""
        for tier in self._buffers.tiers.values():
            tier.drop_windows_ahead()

    @property
    def seconds(self) -> float:
        """Time spent in the optimizer kernels."""
        return self._stages.seconds

    @property
    def elements(self) -> int:
        """Number of elements updated."""
        return self._stages.elements

    def close(self) -> None:
        """Stop the thread after the jobs queued so far."""
        self._jobs.put(None)
        # An engine that was not closed may be collected in any thread.
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.forget_buffers()

    def forget_buffers(self) -> None:
        """Drop cached views of tiers and pools, whose memory is about to move. No job may be queued."""
        self._stages.forget_buffers()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._buffers.device.enter_thread()
        while True:
            self._read_ahead()
            if self._reading:
                self._writing.append(self._stages.compute(self._reading.popleft()))
            elif self._writing:
                self._finish_write()
            # Only after all reads and writes in flight, so that closing loses no update.
            elif self._closing:
                return
            # Writes that have ended give back buffers of tiles, which the next reads wait for.
            while self._writing and all(transfer.done() for transfer in self._writing[0].writes):
                self._finish_write()

    def _read_ahead(self) -> None:
        """Start reads until enough are in flight, no buffer is free, or no job is queued."""
        # Reads cross the border between jobs, so the drive is busy while one unit ends and the next begins.
        while len(self._reading) < self._buffers.reads_ahead:
            if self._running is None and not self._open_next():
                return
            assert self._running is not None
            started = self._stages.read(self._running)
            if started is None:
                return
            self._reading.append(started)
            if started.last:
                self._running = None

    def _open_next(self) -> bool:
        """Start the next job and the transfer of its parameters. Returns False if it cannot start yet.

        Sleeps only if nothing is in flight.
        """
        if self._waiting is None:
            idle = not self._reading and not self._writing and not self._closing
            try:
                self._waiting = self._jobs.get(idle)
            except concurrency.Empty:
                return False
            if self._waiting is None:
                self._closing = True
                return False
        placed = self._waiting
        ready = all(transfer.done() for transfer in (placed.after, placed.arrives or DONE, placed.checked))
        if (self._reading or self._writing) and not ready:
            return False  # its dependencies may wait for tiles in flight here
        # No staging buffer is free: a job in flight has it, and gives it back.
        self._running = self._stages.open(placed)
        if self._running is None:
            return False
        self._waiting = None
        return True

    def _finish_write(self) -> None:
        item = self._writing.popleft()
        self._stages.end(item)
        # After `end`: `submit` may run a small update in the model's thread as soon as the counters are equal.
        if item.last:
            self._ended += 1
