"""The update: a unit's optimizer step, streamed tile by tile, with reads, compute and writes overlapped.

One thread executes jobs in order. It keeps reads of the next tiles in flight while Adam runs on the oldest tile and
finished tiles are written. A buffer is reused once its write has ended. On memory tiers, tiles are views and nothing is
copied.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from infinity.plan.formats import Range, StateFormat
from infinity.plan.grad_dtypes import GradDtypes
from infinity.plan.layout import Run, UnitLayout
from infinity.plan.placement import Extent, Tile, tiles
from infinity.tiers.base import Tier, Window
from infinity.tiers.device import Device
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.slab import SlabTier
from infinity.tiers.transfer import DONE, Failed, Transfer
from infinity.update.job import INLINE, UpdateJob

Kernel = Callable[..., None]
"""(states by name, param, grad, hyper, step, grad_scale, first) for one run of elements; see `update_run` in
`infinity.update.kernels`.
"""


@dataclass
class UpdateBuffers:
    """Tiers, extents and formats of states, and the buffers of the pipeline."""

    device: Device
    param_tier: Tier
    optim_tier: Tier
    grad_tier: Tier | None
    param_extent: Callable[[int], Extent]
    optim_extent: Callable[[int], Extent]
    grad_extent: Callable[[int], Extent]
    formats: Callable[[torch.dtype], StateFormat]
    tile_size: int
    reads_ahead: int
    """Number of tiles read ahead of compute."""
    tile_pool: Pool
    grad_tile_pool: Pool
    param_pool: Pool | None
    """Host buffers for parameter shards; None if the update works in the device buffers or in `param_slab`."""
    param_slab: SlabTier | None
    """The tier in whose extents the host updates parameters; None: it works in buffers."""
    grads: Callable[[torch.dtype], GradDtypes]

    @property
    def in_target(self) -> bool:
        """Return whether the update works in the unit's buffer itself."""
        return self.param_pool is None and self.param_slab is None


_NOTHING = torch.empty(0)


@dataclass(slots=True)
class _Cut:
    """A tile, and the byte range of each state in it."""

    tile: Tile
    ranges: dict[str, Range]
    states: dict[str, torch.Tensor] | None = None
    """The states as tensors on a memory tier, where their address is fixed; else None."""


class _Plan:
    """Extents, dtypes and tiles of a unit, reused by all its updates."""

    def __init__(self, layout: UnitLayout, places: UpdateBuffers) -> None:
        formats = places.formats(layout.dtype)
        self.param = places.param_extent(layout.index)
        self.optim = places.optim_extent(layout.index)
        self.grad = None if places.grad_tier is None else places.grad_extent(layout.index)
        self.stored = places.grads(layout.dtype).stored
        self.cuts = [
            _Cut(tile, formats.ranges(tile.stop - tile.start))
            for tile in tiles(layout.shard_numel, places.tile_size, formats)
        ]


@dataclass(slots=True)
class _Running:
    """A running job: its parameter shard in memory that the update can work in, and the tiles not yet read."""

    job: UpdateJob
    plan: _Plan
    memory: torch.Tensor
    """The shard's bytes, uint8."""
    param: torch.Tensor
    """The same as elements."""
    arrived: Transfer
    staging: Lease | None
    tiles: deque[_Cut]
    runs: Sequence[Run] | None = None
    failed: BaseException | None = None
    skipped: bool | None = None
    """True if the gradient is NaN or infinite, so that nothing is updated; None: not checked yet."""

    def forget(self) -> None:
        """Drop every view of the unit's buffer, whose lease may end as soon as the job is done."""
        self.memory = self.param = _NOTHING
        self.arrived = DONE
        self.job.target = None
        self.job.arrives = None
        self.job.reached = self.job.fetched = DONE


@dataclass(slots=True)
class _Tile:
    running: _Running
    cut: _Cut
    states: Window
    grad: Window | None
    last: bool

    @property
    def windows(self) -> list[Window]:
        return [self.states, self.grad] if self.grad is not None else [self.states]


@dataclass(slots=True)
class _Write:
    transfers: list[Transfer]
    item: _Tile


class UpdatePipeline:
    """The thread that updates units.

    `seconds`: time spent in the optimizer kernels. `elements`: elements updated. `refused`: names of units that were
    not updated, since their gradient was NaN or infinite; ranks exchange their number before they raise.
    """

    def __init__(self, places: UpdateBuffers, kernel: Kernel) -> None:
        self.seconds = 0.0
        self.elements = 0
        self.refused: list[str] = []
        self._places = places
        self._kernel = kernel
        self._plans: dict[int, _Plan] = {}
        self._views: dict[tuple[int, int, torch.dtype], dict[str, torch.Tensor]] = {}
        """(address, elements, dtype of parameters) → states in a buffer of the tile pool, by name. Making a view takes
        longer than finding it, and hands the interpreter to the model's thread.
        """
        self._inline = places.device.host_addressable and all(
            tier is None or tier.immediate for tier in (places.param_tier, places.optim_tier, places.grad_tier)
        )
        self._submitted = self._ended = 0
        """Numbers of jobs queued and of jobs finished by the thread. Each counter is written by one thread only."""
        self._jobs: queue.SimpleQueue[UpdateJob | None] = queue.SimpleQueue()
        self._closing = False
        self._waiting: UpdateJob | None = None
        self._running: _Running | None = None
        self._reading: deque[_Tile] = deque()
        self._writing: deque[_Write] = deque()
        self._thread = threading.Thread(target=self._run, name="infinity-update", daemon=True)
        self._thread.start()

    def submit(self, job: UpdateJob) -> None:
        """Queue a job whose target is attached, or execute it at once if it is small.

        Errors are raised by waits for the job's `computed` or `done`.
        """
        if self._is_immediate(job):
            self._update_now(job)
            return
        self._submitted += 1
        self._jobs.put(job)

    def _is_immediate(self, job: UpdateJob) -> bool:
        """True if the job is small and needs no wait, and the thread is idle."""
        return (
            self._inline
            and job.layout.shard_numel <= INLINE
            and self._submitted == self._ended
            and job.after.done()
            and (job.arrives is None or job.arrives.done())
            and (job.gradient is None or job.gradient.done())
        )

    def _update_now(self, job: UpdateJob) -> None:
        running = self._open(job)
        assert running is not None
        while running.tiles:
            item = self._start_tile(running)
            assert item is not None
            self._end(self._compute(item))
        if running.failed is not None and not isinstance(running.failed, Exception):
            raise running.failed  # Ctrl-C in this thread

    @property
    def in_tier(self) -> bool:
        """Return whether updates begin from the parameters in their tier, and not from those in the unit's buffer."""
        return self._places.param_slab is not None

    def close(self) -> None:
        """Stop the thread after the jobs queued so far."""
        self._jobs.put(None)
        if (
            threading.current_thread() is not self._thread
        ):  # an engine that was not closed may be collected in any thread
            self._thread.join()
        self.forget_buffers()

    def forget_buffers(self) -> None:
        """Drop cached views of tiers and pools, whose memory is about to move. No job may be queued."""
        self._views.clear()
        self._plans.clear()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._places.device.enter_thread()
        while True:
            self._read_ahead()
            if self._reading:
                self._writing.append(self._compute(self._reading.popleft()))
            elif self._writing:
                self._finish_write()
            elif self._closing:
                return
            while self._writing and all(transfer.done() for transfer in self._writing[0].transfers):
                self._finish_write()

    def _read_ahead(self) -> None:
        """Start reads until enough are in flight, no buffer is free, or no job is queued."""
        while len(self._reading) < self._places.reads_ahead:
            if self._running is None and not self._open_next():
                return
            assert self._running is not None
            started = self._start_tile(self._running)
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
            except queue.Empty:
                return False
            if self._waiting is None:
                self._closing = True
                return False
        job = self._waiting
        if (self._reading or self._writing) and not (job.after.done() and (job.arrives or DONE).done()):
            return False  # its dependencies may wait for tiles in flight here
        self._running = self._open(self._waiting)
        if self._running is None:
            return False
        self._waiting = None
        return True

    def _open(self, job: UpdateJob) -> _Running | None:
        places = self._places
        plan = self._plan(job.layout)
        staging: Lease | None = None
        if places.param_slab is not None:
            work = places.param_slab.memory(plan.param)
        else:
            assert job.target is not None
            work = job.target
            if places.param_pool is not None:
                staging = places.param_pool.try_lease(work.numel())
                if staging is None:
                    return None
                work = staging.tensor
        arrived = self._bring(job, work)
        return _Running(job, plan, work, work.view(job.layout.dtype), arrived, staging, deque(plan.cuts))

    def _plan(self, layout: UnitLayout) -> _Plan:
        plan = self._plans.get(layout.index)
        if plan is None:
            plan = self._plans[layout.index] = _Plan(layout, self._places)
        return plan

    def _bring(self, job: UpdateJob, work: torch.Tensor) -> Transfer:
        """Start the copy of the parameters to `work` from their tier or from the unit's buffer."""
        places = self._places
        try:
            job.after.wait()
            if places.param_slab is not None:
                return job.fetched
            assert job.target is not None
            if work is job.target:
                places.device.await_copy(job.reached)
            if job.arrives is None:
                return places.param_tier.read(self._plan(job.layout).param, work)
            if work is job.target:
                return job.arrives
            return places.device.copy(work, job.target, after=job.arrives)
        except BaseException as error:  # noqa: BLE001 - raised again by the first tile, and carried by the job
            return Failed(error)

    def _start_tile(self, running: _Running) -> _Tile | None:
        places, plan = self._places, running.plan
        cut = running.tiles[0]
        tile = cut.tile
        states = places.optim_tier.window(plan.optim, tile.offset, tile.nbytes, places.tile_pool)
        if states is None:
            return None
        grad: Window | None = None
        if running.job.gradient is None:
            assert places.grad_tier is not None and plan.grad is not None
            width = plan.stored.itemsize
            span = (tile.start * width, (tile.stop - tile.start) * width)
            grad = places.grad_tier.window(plan.grad, *span, places.grad_tile_pool)
            # The two pools have equally many buffers, and each tile leases one of each.
            assert grad is not None
        running.tiles.popleft()
        return _Tile(running, cut, states, grad, not running.tiles)

    def _compute(self, item: _Tile) -> _Write:
        running = item.running
        transfers: list[Transfer] = []
        # Waits for every read, also after a failure: the kernel must have released the buffers.
        waits = [window.arrived.wait for window in item.windows]
        if self._places.in_target:
            waits.append(partial(self._places.device.await_copy, running.arrived))
        else:
            waits.append(running.arrived.wait)
        for wait in waits:
            try:
                wait()
            except BaseException as error:  # noqa: BLE001 - carried by the job to its waiters
                running.failed = running.failed or error
        try:
            if running.failed is None:
                self._update_tile(item)
                transfers.append(self._places.optim_tier.store(item.states))
        except BaseException as error:  # noqa: BLE001 - carried by the job to its waiters
            running.failed = running.failed or error
        if item.last:
            transfers += self._conclude(running)
        return _Write(transfers, item)

    def _update_tile(self, item: _Tile) -> None:
        running, tile = item.running, item.cut.tile
        job = running.job
        grad = item.grad.tensor.view(running.plan.stored) if item.grad else None
        if grad is None:
            if job.require_finite and running.skipped is None:
                running.skipped = not math.isfinite(job.arrived().squares())
                if running.skipped:
                    self.refused.append(job.layout.name)
            if running.skipped:
                return
            self._places.device.await_copy(job.arrived().reached)
            grad = _part(job.arrived().shard, tile.start, tile.stop)
        if running.runs is None:
            running.runs = job.runs()
        began = time.perf_counter()
        whole = self._states(item)
        for run in running.runs:
            low, high = max(run.start, tile.start), min(run.stop, tile.stop)
            if low >= high:
                continue
            start, stop = low - tile.start, high - tile.start
            states = whole
            if (low, high) != (tile.start, tile.stop):
                ranges = item.cut.ranges
                states = {name: state[ranges[name].kind.part(start, stop)] for name, state in whole.items()}
            self._kernel(
                states,
                _part(running.param, low, high),
                _part(grad, start, stop),
                job.hypers[run.group],
                run.step,
                job.grad_scale,
                job.first + low,
            )
            self.elements += high - low
        self.seconds += time.perf_counter() - began

    def _states(self, item: _Tile) -> dict[str, torch.Tensor]:
        """Return views of the tile's states, by name."""
        cut, tensor = item.cut, item.states.tensor
        if cut.states is not None:
            return cut.states
        key = tensor.data_ptr(), cut.tile.stop - cut.tile.start, item.running.job.layout.dtype
        states = self._views.get(key)
        if states is None:
            states = {name: place.of(tensor) for name, place in cut.ranges.items()}
            if item.states.lease is None:
                cut.states = states
            else:
                self._views[key] = states
        return states

    def _conclude(self, running: _Running) -> list[Transfer]:
        """Finish a job whose tiles are all computed: start the write-back of parameters and release the gradient."""
        job, places = running.job, self._places
        landed: Transfer = DONE
        try:
            # Kernels on a device still read the gradient, whose buffer is released here.
            landed = places.device.compute_reached()
            landed.wait()
        except BaseException as error:  # noqa: BLE001 - carried by the job to its waiters
            running.failed = running.failed or error
        job.release_gradient()
        if running.failed is not None:
            return []
        try:
            write: Transfer = DONE
            if places.param_slab is None:
                write = places.param_tier.write(running.plan.param, running.memory)
            if not places.in_target and job.target is not None:
                landed = places.device.copy(job.target, running.memory, after=job.reached)
        except BaseException as error:  # noqa: BLE001 - carried by the job
            running.failed = error
            return []
        job.mark_computed(landed)
        return [write, landed]

    def _finish_write(self) -> None:
        write = self._writing.popleft()
        self._end(write)
        if write.item.last:
            self._ended += 1

    def _end(self, write: _Write) -> None:
        running = write.item.running
        for transfer in write.transfers:
            try:
                transfer.wait()
            except BaseException as error:  # noqa: BLE001 - carried by the job
                running.failed = running.failed or error
        write.transfers.clear()
        for window in write.item.windows:
            window.release()
        if not write.item.last:
            return
        if write.item.grad is not None:
            assert self._places.grad_tier is not None and running.plan.grad is not None
            self._places.grad_tier.discard(running.plan.grad, write.item.grad.tensor)
        running.forget()
        if running.staging is not None:
            running.staging.release()
        if running.failed is not None:
            running.job.fail(running.failed)
        else:
            running.job.mark_done()


def _part(elements: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return `elements[start:stop]`, which takes longer than to return all of them."""
    return elements if stop - start == elements.numel() else elements[start:stop]
