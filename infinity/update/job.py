"""One unit's update in one step: its gradient, its tiles, and the memory that it works in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from infinity.plan.formats import GradDtypes, Range, StateFormat
from infinity.plan.layout import Run, UnitLayout
from infinity.plan.placement import Placement, State, Tile, tiles
from infinity.plan.policy import UpdatedIn, updated_in
from infinity.rules import Hyper
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier, Window
from infinity.tiers.device import Device
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.transfer import DONE, Promise, Transfer

INLINE = 1 << 15
"""Largest shard, in elements, that the calling thread processes itself if nothing has to be waited for: waking another
thread would take longer."""


@dataclass(eq=False)
class Squares:
    """A gradient's sum of squares. Any thread may ask for it."""

    known: float | None
    """None: it is not summed (yet)."""

    def total(self) -> float:
        """Return the sum. Waits for the device if that computes it (`infinity.grads.squares`)."""
        assert self.known is not None, "the squares of an incomplete sum are not summed"
        return self.known


class Gradient:
    """A reduced gradient shard (shard_numel,) in a leased buffer or in its extent, and its sum of squares."""

    def __init__(self, shard: torch.Tensor, lease: Lease | None, squares: Squares, reached: Transfer) -> None:
        """lease: released with the gradient; None: the shard is in its extent alone. reached: done when `shard` is
        computed, for an update on the device.
        """
        self.shard = shard
        self.squares = squares
        self.reached = reached
        self._on_release: Callable[[], None] | None = None
        self._lease = lease
        self._released = Promise()

    def call_on_release(self, call: Callable[[], None]) -> None:
        """Call `call` once nothing reads the gradient."""
        self._on_release = call

    def release(self) -> None:
        del self.shard
        if self._lease is not None:
            self._lease.release()
        if self._on_release is not None:
            self._on_release()
        self._released.keep()

    def wait_until_released(self) -> None:
        self._released.wait()


@dataclass(frozen=True)
class UpdateProgress:
    """How far a unit's update has come. Kept by the unit and by commits; it refers to no memory of the unit."""

    began: Promise = field(default_factory=Promise)
    """Done when the update was passed to the pipeline."""
    computed: Promise = field(default_factory=Promise)
    """Done when the parameters are updated."""
    done: Promise = field(default_factory=Promise)
    """Done when all states are back in their tiers."""

    def fail(self, error: BaseException) -> None:
        for promise in (self.computed, self.done):
            if not promise.done():
                promise.fail(error)


@dataclass(frozen=True)
class UpdateJob:
    """One unit's update in one step, before it is known where the parameters are."""

    layout: UnitLayout
    runs: Callable[[], Sequence[Run]]
    """Returns the ranges to update. Called once the gradient has arrived, since it shows which parameters have one."""
    hypers: Sequence[Hyper]
    grad_scale: float
    first: int
    """Index of the shard's first element in the model."""
    gradient: Future[Gradient] | None = None
    """The gradient shard, in memory that the update can work in; None: read from its tier, tile by tile."""
    require_finite: bool = False
    allowed: Callable[[], bool] | None = None
    """Returns whether the update may happen, and waits until that is known; None: it may."""
    gate: Transfer = DONE
    """Done when the unit's states may be written: when the snapshots that were due at the job's creation are read."""
    progress: UpdateProgress = field(default_factory=UpdateProgress)

    def arrived(self) -> Gradient:
        assert self.gradient is not None
        return self.gradient.result()

    def release_gradient(self) -> None:
        if self.gradient is not None and self.gradient.exception() is None:
            self.gradient.result().release()


@dataclass(frozen=True)
class PlacedUpdate:
    """An update and the parameters that it changes. It refers to the unit's buffer: no one keeps it but the pipeline.

    The update starts once all of `after`, `checked` and `arrives` are done.
    """

    job: UpdateJob
    target: torch.Tensor | None
    """This rank's shard of the unit's device buffer, uint8; None: the update changes the tier alone."""
    arrives: Transfer | None
    """Done when the target holds the parameters; None: the update reads them from their tier."""
    reached: Transfer
    """Done when compute no longer uses the buffer, so that it may be written."""
    fetched: Transfer = DONE
    """Done when the last fetch no longer reads the parameters' tier, so that it may be written."""
    after: Transfer = DONE
    """Done after the unit's previous update, whose writes this one reads, and after a save that still reads the states.
    """
    prepare: Callable[[], None] | None = None
    """Called once, before the update reads any state and after `after`."""
    checked: Transfer = DONE
    """Done when `prepare` does not wait for the device."""


@dataclass
class UpdateBuffers:
    """Tiers, extents and formats of states, and the buffers of the pipeline."""

    device: Device
    placement: Placement
    tiers: Mapping[TierKind, Tier]
    """Tiers of parameters and optimizer states, by name."""
    grad_tiers: Mapping[TierKind, Tier]
    """Tiers of stored gradients, by name."""
    formats: Callable[[torch.dtype], StateFormat]
    """Dtype of parameters → format of their optimizer states."""
    grads: Callable[[torch.dtype], GradDtypes]
    reads_ahead: int
    """Number of tiles read ahead of compute."""
    tile_pool: Pool
    grad_tile_pool: Pool
    param_pool: Pool | None
    """Host buffers for shards of parameters that are updated in "staging" (`updated_in`); None if there are none."""
    beside_compute: bool
    """True if updates overlap with the model's operations on the same processors."""

    def updated_in(self, unit: int) -> UpdatedIn:
        """Return the memory in which a unit's parameters are updated."""
        return updated_in(self.placement, unit, host_addressable=self.device.host_addressable)


_NOTHING = torch.empty(0)


class TileLayout(NamedTuple):
    """A tile, and the byte range of each state in it."""

    tile: Tile
    ranges: dict[str, Range]


class UnitTiles:
    """Extents, tiers, dtypes and tiles of a unit, reused by all its updates."""

    def __init__(self, layout: UnitLayout, buffers: UpdateBuffers) -> None:
        formats, placement = buffers.formats(layout.dtype), buffers.placement
        self.param, self.optim, self.grad = (
            placement.of(layout.index, state) for state in (State.PARAM, State.OPTIM, State.GRAD)
        )
        self.param_tier, self.optim_tier = buffers.tiers[self.param.tier], buffers.tiers[self.optim.tier]
        self.grad_tier = buffers.grad_tiers[self.grad.tier]
        self.updated_in = buffers.updated_in(layout.index)
        self.stored = buffers.grads(layout.dtype).stored
        # Layouts never change, so each unit cuts its tiles once.
        self.tiles = [
            TileLayout(tile, formats.ranges(tile.stop - tile.start))
            for tile in tiles(layout.shard_numel, placement.tile_sizes[layout.index], formats)
        ]


@dataclass(slots=True)
class RunningJob:
    """A running job: its parameter shard in memory that the update can work in, and the tiles not yet read."""

    placed: PlacedUpdate | None
    """None once the job has ended."""
    unit: UnitTiles
    memory: torch.Tensor
    """The shard's bytes, uint8."""
    param: torch.Tensor
    """The same as elements."""
    arrived: Transfer
    staging: Lease | None
    tiles: deque[TileLayout]
    grad: Window | None = None
    """Gradient of the next tile, which is read while its states have no buffer."""
    failed: BaseException | None = None
    skipped: bool | None = None
    """True if the loss or the gradient is NaN or infinite, so that nothing is updated; None: not checked yet."""
    _runs: Sequence[Run] | None = None

    @property
    def job(self) -> UpdateJob:
        assert self.placed is not None
        return self.placed.job

    def runs(self) -> Sequence[Run]:
        """Return the ranges to update. The gradient must have arrived, since it shows which parameters have one."""
        if self._runs is None:
            self._runs = self.job.runs()
        return self._runs

    def is_skipped(self, is_refused: Callable[[UpdateJob], bool]) -> bool:
        """Return whether nothing is updated. is_refused: asked once; it may wait for the gradient."""
        if self.skipped is None:
            self.skipped = is_refused(self.job)
        return self.skipped

    def keep_grad(self, grad: Window | None) -> None:
        """Keep the gradient of the next tile, which is being read."""
        self.grad = grad

    def take_grad(self) -> Window | None:
        """Return the gradient of the next tile if its read has begun, else None."""
        grad, self.grad = self.grad, None
        return grad

    def fail(self, error: BaseException) -> None:
        """Record the first error, which waiters for the job raise."""
        # The first one is the cause; later waits of the same job often fail by it.
        self.failed = self.failed or error

    def forget(self) -> None:
        """Drop every view of the unit's buffer, whose lease may end as soon as the job is done."""
        self.memory = self.param = _NOTHING
        self.arrived = DONE
        self.placed = None


@dataclass(slots=True)
class TileInFlight:
    """A tile that is being read, updated or written. `last`: of its job. Its buffers are released after its writes."""

    running: RunningJob
    layout: TileLayout
    states: Window
    grad: Window | None
    last: bool
    writes: list[Transfer] = field(default_factory=list)

    @property
    def windows(self) -> list[Window]:
        return [self.states, self.grad] if self.grad is not None else [self.states]
