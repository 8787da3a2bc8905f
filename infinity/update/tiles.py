"""Records of running updates: the tiles of a unit, a running job, a tile in flight.

The memory that updates work in: tiers, extents and formats of states, and pools of buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from infinity.plan.formats import GradDtypes, StateFormat
from infinity.plan.layout import Run, UnitLayout
from infinity.plan.placement import Placement, State, TileLayout, unit_tiles
from infinity.plan.policy import UpdatedIn, updated_in
from infinity.plan.windows import RecordsFormat
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier, Window
from infinity.tiers.device import Device
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.transfer import DONE, Transfer
from infinity.update.job import INLINE, PlacedUpdate, UpdateJob


@dataclass
class UpdateBuffers:
    """Tiers, extents and formats of states, and the buffers of the pipeline."""

    device: Device
    placement: Placement
    tiers: Mapping[TierKind, Tier]
    """Tiers of parameters and optimizer states, by name."""
    grad_tiers: Mapping[TierKind, Tier]
    """Tiers of stored gradients, by name."""
    formats: Callable[[UnitLayout], StateFormat | RecordsFormat]
    """Unit → format of its optimizer states."""
    rank: int
    """Index of this rank's shard."""
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


class UnitTiles:
    """Extents, tiers, dtypes and tiles of a unit, reused by all its updates."""

    def __init__(self, layout: UnitLayout, buffers: UpdateBuffers) -> None:
        placement = buffers.placement
        self.param, self.optim, self.grad = (
            placement.of(layout.index, state) for state in (State.PARAM, State.OPTIM, State.GRAD)
        )
        self.param_tier, self.optim_tier = buffers.tiers[self.param.tier], buffers.tiers[self.optim.tier]
        self.grad_tier = buffers.grad_tiers[self.grad.tier]
        self.updated_in = buffers.updated_in(layout.index)
        # A rule in Python takes longer than to wake a thread, whatever the size.
        immediate = not layout.windows and all(
            tier.immediate for tier in (self.param_tier, self.optim_tier, self.grad_tier)
        )
        self.is_immediate = layout.shard_numel <= INLINE and buffers.device.host_addressable and immediate
        """True if an update takes less time than to wake a thread, and waits for no transfer of its own."""
        self.stored = buffers.grads(layout.dtype).stored
        # Layouts never change, so each unit cuts its tiles once.
        tile_size = placement.tile_sizes[layout.index]
        self.tiles = unit_tiles(layout, buffers.rank, tile_size, buffers.formats(layout))


@dataclass(slots=True)
class RunningJob:
    """A running job: its parameter shard in memory that the update can work in, and the tiles not yet read."""

    job: UpdateJob
    placed: PlacedUpdate | None
    """None once the job has ended."""
    unit: UnitTiles
    memory: torch.Tensor
    """The shard's bytes, uint8."""
    param: torch.Tensor
    """The same as elements."""
    before: torch.Tensor | None
    """The elements that a draft starts from; None: those of `param`."""
    arrived: Transfer
    staging: Lease | None
    tiles: deque[TileLayout]
    grad: Window | None = None
    """Gradient of the next tile, which is read while its states have no buffer."""
    failed: BaseException | None = None
    skipped: bool | None = None
    """True if the loss or the gradient is NaN or infinite, so that nothing is updated; None: not checked yet."""
    _runs: Sequence[Run] | None = None

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

    def skip(self) -> None:
        """Update nothing, and read no more than ends the job."""
        self.skipped = True
        self.tiles = deque([self.tiles[-1]])

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
        self.before = None
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
    windows: list[Window] = field(init=False)

    def __post_init__(self) -> None:
        self.windows = [self.states] if self.grad is None else [self.states, self.grad]
