"""The stages of an update: a unit's parameters and a tile's states are read, updated and written.

No stage starts a thread or queues jobs. On memory tiers, tiles are views and nothing is copied.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from infinity.concurrency import now
from infinity.plan.layout import Run, UnitLayout
from infinity.plan.placement import TileLayout
from infinity.tiers.pool import Lease
from infinity.tiers.transfer import DONE, Failed, Transfer
from infinity.update.job import PlacedUpdate, UpdateJob
from infinity.update.tiles import RunningJob, TileInFlight, UnitTiles, UpdateBuffers

_Values = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Parameters of a shard, and states of a tile by name."""
Kernel = Callable[..., None]
"""(states by name, param, grad, hyper, step, grad_scale, first, *, background) for one run of elements; see
`update_run` in `infinity.update.kernels`.
"""

WholeKernel = Callable[..., int]
"""`update_whole` in `infinity.update.whole`."""


class UpdateStages:
    """Executes jobs tile by tile: `open`, then `read`, `compute` and `end` for each tile, in one thread at a time."""

    def __init__(self, buffers: UpdateBuffers, kernel: Kernel, whole: WholeKernel) -> None:
        self.seconds = 0.0
        """Time spent in the optimizer kernels."""
        self.elements = 0
        """Number of elements updated."""
        self.refused: list[str] = []
        """Names of units that were not updated, since their gradient was NaN or infinite."""
        self._buffers = buffers
        self._kernel, self._whole = kernel, whole
        self._units: dict[int, UnitTiles] = {}
        self._views: dict[tuple[int, int, torch.dtype], dict[str, torch.Tensor]] = {}
        """(address, elements, dtype of parameters) → states of a tile, by name. Making a view takes longer than finding
        it, and hands the interpreter to the model's thread.
        """

    def forget_buffers(self) -> None:
        """Drop cached views of tiers and pools, whose memory is about to move. No job may be running."""
        self._views.clear()
        self._units.clear()

    def open(self, placed: PlacedUpdate) -> RunningJob | None:
        """Start the transfer of a job's parameters. Returns None if no buffer is free."""
        layout = placed.job.layout
        unit = self.unit(layout)
        staging: Lease | None = None
        if unit.updated_in == "staging":
            assert self._buffers.param_pool is not None
            staging = self._buffers.param_pool.try_lease(unit.param.nbytes)
            if staging is None:
                return None
        ready, skipped = self._prepare(placed, unit)
        work = placed.target
        if unit.updated_in == "tier":
            work = unit.param_tier.memory(unit.param)
        elif staging is not None:
            work = staging.tensor
        assert work is not None
        arrived = self._read_param(placed, unit, work) if ready is DONE else ready
        before = unit.param_tier.before(unit.param) if unit.updated_in == "tier" else None
        running = RunningJob(
            placed.job,
            placed,
            unit,
            work,
            work.view(layout.dtype),
            None if before is None else before.view(layout.dtype),
            arrived,
            staging,
            deque(unit.tiles),
        )
        if skipped:
            running.skip()
        return running

    def _prepare(self, placed: PlacedUpdate, unit: UnitTiles) -> tuple[Transfer, bool]:
        """Make the unit's states ready to be read, and begin a draft. Returns an error as a transfer, else `DONE`, and
        whether the update must not be made.
        """
        try:
            # The update before, or a save, still uses these states; `prepare` then brings an edit into them.
            placed.after.wait()
            if placed.prepare is not None:
                placed.prepare()
            places = (unit.param_tier, unit.param), (unit.optim_tier, unit.optim)
            draft = placed.job.draft
            return DONE, draft is not None and not draft.open(places)
        except BaseException as error:  # noqa: BLE001 - raised again by the first tile, and carried by the job
            return Failed(error), False

    def unit(self, layout: UnitLayout) -> UnitTiles:
        """Return the extents and tiles of a unit."""
        unit = self._units.get(layout.index)
        if unit is None:
            unit = self._units[layout.index] = UnitTiles(layout, self._buffers)
        return unit

    def _read_param(self, placed: PlacedUpdate, unit: UnitTiles, work: torch.Tensor) -> Transfer:
        """Start the copy of the parameters to `work` from their tier or from the unit's buffer."""
        device = self._buffers.device
        try:
            # Parameters change in place, and the last fetch may still read them [Note: updates in the extent].
            if unit.updated_in == "tier":
                return placed.fetched
            assert placed.target is not None
            if unit.updated_in == "buffer":
                device.await_copy(placed.reached)
            if placed.arrives is None:
                return unit.param_tier.read(unit.param, work)
            if unit.updated_in == "buffer":
                return placed.arrives
            return device.copy(work, placed.target, after=placed.arrives)
        except BaseException as error:  # noqa: BLE001 - raised again by the first tile, and carried by the job
            return Failed(error)

    def read_ahead(self, layout: UnitLayout) -> bool:
        """Start to read the optimizer states of a unit before its job exists. Returns False if no buffer is free.

        No write of them may be under way.
        """
        unit, pool = self.unit(layout), self._buffers.tile_pool
        # Memory has nothing to read ahead, and the next units may still be on nvme.
        if unit.optim_tier.kind.in_memory:
            return True
        tiles = (layout.tile for layout in unit.tiles)
        return all(unit.optim_tier.window_ahead(unit.optim, tile.offset, tile.nbytes, pool) for tile in tiles)

    def read(self, running: RunningJob) -> TileInFlight | None:
        """Start the read of a job's next tile. Returns None if no buffer is free."""
        buffers, unit = self._buffers, running.unit
        layout = running.tiles[0]
        tile = layout.tile
        grad = running.take_grad()
        # A gradient in memory is taken whole; a stored one is read tile by tile, like the states.
        if grad is None and running.job.gradient is None:
            width = unit.stored.itemsize
            span = (tile.start * width, (tile.stop - tile.start) * width)
            grad = unit.grad_tier.window(unit.grad, *span, buffers.grad_tile_pool)
            if grad is None:
                return None
        states = unit.optim_tier.window(unit.optim, tile.offset, tile.nbytes, buffers.tile_pool)
        if states is None:
            running.keep_grad(grad)  # its buffer may not be reused while it is being read
            return None
        running.tiles.popleft()
        return TileInFlight(running, layout, states, grad, not running.tiles)

    def compute(self, item: TileInFlight) -> TileInFlight:
        """Update a tile, once it is read, and start its writes. Errors are the job's. Returns the tile."""
        running = item.running
        # Waits for every read, also after a failure: the kernel must have released the buffers.
        waits = [window.arrived.wait for window in item.windows]
        if running.unit.updated_in == "buffer":
            waits.append(partial(self._buffers.device.await_copy, running.arrived))
        else:
            waits.append(running.arrived.wait)
        for wait in waits:
            try:
                wait()
            except BaseException as error:  # noqa: BLE001 - carried by the job to its waiters
                running.fail(error)
        try:
            if running.failed is None and self._update(item):
                item.writes.append(running.unit.optim_tier.store(item.states))
        except BaseException as error:  # noqa: BLE001 - carried by the job to its waiters
            running.fail(error)
        # Parameters leave their buffer in one write, after the last tile.
        if item.last:
            item.writes.extend(self._conclude(running))
        return item

    def _update(self, item: TileInFlight) -> bool:
        """Update a tile. Returns False if nothing is updated."""
        running, tile = item.running, item.layout.tile
        job = running.job
        grad = item.grad.tensor.view(running.unit.stored) if item.grad else None
        if grad is None:
            # Asked at the first tile, before any state has changed, and once for the whole unit.
            if running.is_skipped(self._is_refused):
                return False
            # Waits on the stream: the host goes on, and the kernel follows the gradient [Note: order on a device].
            self._buffers.device.await_copy(job.arrived().reached)
            grad = _part(job.arrived().shard, tile.start, tile.stop)
        runs = running.runs()
        began = now()
        clock = now if running.param.is_cpu else self._buffers.device.stamp
        with self._buffers.device.recorder.span("update", job.layout.name, item.states.tensor.nbytes, clock):
            if job.layout.windows:
                given = job.layout, item.layout, runs, job.hypers, running.param, item.states.tensor, grad
                self.elements += self._whole(*given, job.grad_scale, self._buffers.device.torch_device)
            else:
                self._run(item, runs, self._states(item, item.states.tensor), grad)
        self.seconds += now() - began
        return True

    def _run(self, item: TileInFlight, runs: Sequence[Run], whole: dict[str, torch.Tensor], grad: torch.Tensor) -> None:
        """Update the parts of a tile that are in `runs`. whole: the tile's states, by name."""
        running, tile, job = item.running, item.layout.tile, item.running.job
        # An update that waits for a drive keeps its priority, since the drive then waits for the update.
        in_memory = item.states.lease is None and (item.grad is None or item.grad.lease is None)
        background = self._buffers.beside_compute and in_memory
        values = running.param, whole
        before = self._before(item, whole)
        end = tile.start
        # Parameters of other param_groups, and those without a gradient, lie between the runs [Note: counts of
        # updates].
        for run in runs:
            low, high = max(run.start, tile.start), min(run.stop, tile.stop)
            if low >= high:
                continue
            if before is not None:
                _copy(item.layout, values, before, end, low)
            param, states = _cut(item.layout, values, low, high)
            self._kernel(
                states,
                param,
                _part(grad, low - tile.start, high - tile.start),
                job.hypers[run.group],
                run.step,
                job.grad_scale,
                job.first + low,
                background=background,
                before=None if before is None else _cut(item.layout, before, low, high),
            )
            self.elements += high - low
            end = high
        if before is not None:
            _copy(item.layout, values, before, end, tile.stop)

    def _before(self, item: TileInFlight, whole: dict[str, torch.Tensor]) -> _Values | None:
        """Return the values that a draft of a tile starts from; None if they are where the update works."""
        param, states = item.running.before, item.states.before
        if param is None and states is None:
            return None
        return item.running.param if param is None else param, whole if states is None else self._states(item, states)

    def _is_refused(self, job: UpdateJob) -> bool:
        """Return whether nothing may be updated, since the loss or the gradient is NaN or infinite, or since a draft
        would be dropped.
        """
        if job.draft is not None:
            return not job.draft.proceed(job.arrived().squares.total())
        if job.allowed is not None and not job.allowed():
            return True
        if not job.require_finite or math.isfinite(job.arrived().squares.total()):
            return False
        self.refused.append(job.layout.name)
        return True

    def _states(self, item: TileInFlight, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of the tile's states in `tensor`, by name."""
        layout = item.layout
        # Memory tiers do not move, and buffers of the pool come back at the same addresses.
        key = tensor.data_ptr(), layout.tile.stop - layout.tile.start, item.running.job.layout.dtype
        states = self._views.get(key)
        if states is None:
            states = self._views[key] = {name: place.of(tensor) for name, place in layout.ranges.items()}
        return states

    def _conclude(self, running: RunningJob) -> list[Transfer]:
        """Finish a job whose tiles are all computed: start the write-back of parameters and release the gradient."""
        placed, unit, device = running.placed, running.unit, self._buffers.device
        assert placed is not None
        landed: Transfer = DONE
        try:
            # Kernels on a device still read the gradient, whose buffer is released here.
            landed = device.compute_reached()
            landed.wait()
        except BaseException as error:  # noqa: BLE001 - carried by the job to its waiters
            running.fail(error)
        # Before the writes: backward may be waiting for this buffer to collect the next gradient.
        placed.job.release_gradient()
        if running.failed is not None:
            return []
        try:
            write: Transfer = DONE
            if placed.writes and unit.updated_in != "tier" and not (running.skipped and placed.job.draft):
                write = unit.param_tier.write(unit.param, running.memory)
            if unit.updated_in != "buffer" and placed.target is not None:
                landed = device.copy(placed.target, running.memory, after=placed.reached)
        except BaseException as error:  # noqa: BLE001 - carried by the job
            running.fail(error)
            return []
        # A fetch may gather the new parameters from now on, while the tiers are still written.
        placed.job.progress.computed.keep(landed)
        return [write, landed]

    def end(self, item: TileInFlight) -> None:
        """Wait for a tile's writes and release its buffers; after the last one, complete the job."""
        running = item.running
        for transfer in item.writes:
            try:
                transfer.wait()
            except BaseException as error:  # noqa: BLE001 - carried by the job
                running.fail(error)
        item.writes.clear()
        for window in item.windows:
            window.release()
        if not item.last:
            return
        if item.grad is not None:
            running.unit.grad_tier.discard(running.unit.grad, item.grad.tensor)
        progress, draft = running.job.progress, running.job.draft
        if draft is not None:
            draft.end(failed=running.failed is not None)
        # Before the promises are kept: whoever waits may count references to the unit's buffer.
        running.forget()
        if running.staging is not None:
            running.staging.release()
        if running.failed is not None:
            progress.fail(running.failed)
        else:
            progress.done.keep()


def _cut(layout: TileLayout, values: _Values, low: int, high: int) -> _Values:
    """Return the values of the shard's elements [low, high), which are in the tile."""
    param, states = values
    tile = layout.tile
    if (low, high) != (tile.start, tile.stop):
        start, stop = low - tile.start, high - tile.start
        states = {name: state[layout.ranges[name].kind.part(start, stop)] for name, state in states.items()}
    return _part(param, low, high), states


def _copy(layout: TileLayout, target: _Values, source: _Values, low: int, high: int) -> None:
    """Copy the values of elements that an update leaves out."""
    if low < high:
        param, states = _cut(layout, target, low, high)
        before, states_before = _cut(layout, source, low, high)
        param.copy_(before)
        for name, state in states.items():
            state.copy_(states_before[name])


def _part(elements: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return `elements[start:stop]`, which takes longer than to return all of them."""
    return elements if stop - start == elements.numel() else elements[start:stop]
