"""A unit at run time: its parameters, their residency, the allowed transitions, and errors in them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.errors import RanksError, ResidencyError, UpdateError, UsageError
from infinity.interrupts import ForcedInterrupt, uninterrupted
from infinity.observe.recorder import Recorder
from infinity.plan.layout import UnitLayout
from infinity.tiers.digests import Fingerprint
from infinity.tiers.pool import Lease
from infinity.tiers.transfer import DONE, Transfer, also
from infinity.units.compiled import outside_modes
from infinity.units.stored import inner

if TYPE_CHECKING:
    from infinity.update.job import UpdateJob, UpdateProgress


class Residency(Enum):
    """Location of a unit's parameters."""

    RELEASED = "in its tier only; parameters show a placeholder of the right shape"
    FETCHING = "on the way into a leased device buffer"
    RESIDENT = "in a device buffer, or in place, and its parameters view it"
    UPDATING = "in a device buffer that the update is changing; parameters show the placeholder"

    __hash__ = object.__hash__  # members are singletons; Enum hashes their names, in Python


TRANSITIONS: frozenset[tuple[Residency, Residency]] = frozenset(
    {
        (Residency.RELEASED, Residency.FETCHING),
        (Residency.FETCHING, Residency.RESIDENT),
        # the fetch failed, or the unit was prefetched and the step deviated from its trace
        (Residency.FETCHING, Residency.RELEASED),
        (Residency.RESIDENT, Residency.RELEASED),
        (Residency.FETCHING, Residency.UPDATING),  # fetched for the next step before this one's update
        (Residency.RESIDENT, Residency.UPDATING),
        (Residency.RELEASED, Residency.UPDATING),  # updated before its first use in the next forward
        # the update computed this rank's shard; other ranks' shards are gathered
        (Residency.UPDATING, Residency.FETCHING),
        (Residency.UPDATING, Residency.RELEASED),
    }
)

_placeholders: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


@lru_cache(maxsize=4096)
def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return one NaN (0 for integers) expanded with stride 0 to `shape`.

    Models read shapes and dtypes at run time, and autograd checks them. Operations through PyTorch's Python interface
    never read its values (`infinity.units.released`).
    """
    # One element serves every shape by stride 0, so released parameters take no memory.
    key = (dtype, device)
    if key not in _placeholders:
        _placeholders[key] = torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)
    return _placeholders[key].expand(shape)


class Unit:
    """Parameters of one layout, and the device buffer that holds them while they are resident."""

    def __init__(
        self,
        layout: UnitLayout,
        parameters: list[nn.Parameter],
        device: torch.device,
        wrappers: Sequence[nn.Parameter] = (),
    ) -> None:
        """parameters: or inner tensors of `wrappers`, by slot."""
        self.layout = layout
        self.index = layout.index
        self.name = layout.name
        self.parameters = parameters
        self.wrappers = wrappers
        """Parameters of the model that consist of inner tensors, some of them here (`infinity.units.stored`)."""
        self.device = device
        self.residency = Residency.RELEASED
        self.owner: tuple[weakref.ref[Unit], weakref.ref[Any]] | None = None
        """References to the unit and to what fetches it, for the registry of buffers (`infinity.units.residents`)."""
        self.lease: Lease | None = None
        self.transfer: Transfer | None = None
        self.fetched: Transfer = DONE
        """The last fetch, which reads the parameters' tier until it is done."""
        self.pin_count = 0
        """Number of running forwards and other scopes that need the unit resident."""
        self.token = object()
        """Referenced by each tensor of the unit that autograd saved and may still unpack."""
        # Counts what this object holds itself, so that the difference is the number of saved references.
        self._without_references = sys.getrefcount(self.token)
        self.generation = 0
        """Count of overwrites of the parameters, such as updates. Earlier references are invalid."""
        self.steps = [0] * len(parameters)
        """Number of updates of each parameter, by slot. Bias correction uses it, not the model's step count."""
        self.update: UpdateProgress | None = None
        """The last update that was started, if a wait for it may be due."""
        self.due_update: UpdateJob | None = None
        """Update that is due before the next use and has not started."""
        self.updated_early = False
        """True if the present step has updated the parameters before `engine.step()`."""
        self.bound = 0
        """Number of parameters that view the unit's buffer, or the buffer that it was released from with live views."""
        self.snapshot_read: Transfer = DONE
        """Done when saves have read the unit's states and its last commit is complete. Writes to its tiers must wait
        for it, and not happen if it fails. `write_after` adds to it.
        """
        self.collected: set[int] = set()
        """Slots whose `.grad` the engine has taken in the present step."""
        self.is_dirty = False
        """True if an update has left its result in the buffer alone: the tier has the parameters of before."""
        self.assignments = [0] * len(parameters)
        """Number of `.data` assignments that the engine has adopted, by slot."""
        self.fingerprint: Fingerprint | None = None
        """Fingerprint of the bytes in the tiers (`Device.fingerprint`); None: unknown, since they were overwritten."""
        self.places = [(slot.shape, _strides(slot.shape), slot.offset) for slot in layout.slots]
        """Shape, strides and offset of each parameter in the unit's flat tensor, by slot."""
        self.addresses = [slot.offset * layout.dtype.itemsize if slot.numel else None for slot in layout.slots]
        """Offset of each parameter in bytes, by slot; None: it is empty."""
        self.views: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        """Address, shape and strides that `infinity.units.binding.bind` gave each parameter, by slot."""

    def advance(self, slots: Collection[int]) -> dict[int, int]:
        """Count one more update of these slots. Returns slot → number of its updates, from 1."""
        for slot in slots:
            self.steps[slot] += 1
        return {slot: self.steps[slot] for slot in slots}

    def register(self, owner: tuple[weakref.ref[Unit], weakref.ref[Any]]) -> None:
        """Record what fetches the unit."""
        self.owner = owner

    def give_buffer(self, lease: Lease) -> None:
        """Lease a device buffer to the unit."""
        self.lease = lease

    def take_buffer(self) -> Lease:
        """Return the lease of the unit's buffer, which it has no longer."""
        lease, self.lease = self.lease, None
        assert lease is not None
        return lease

    def come(self, transfer: Transfer) -> None:
        """Record that `transfer` brings the parameters to the buffer."""
        self.transfer = transfer

    def take_transfer(self) -> Transfer | None:
        """Return the transfer that brings the parameters, which the unit no longer waits for."""
        transfer, self.transfer = self.transfer, None
        return transfer

    def note_read(self, fetched: Transfer) -> None:
        """Record the last transfer that reads the parameters' tier."""
        self.fetched = fetched

    def take_update(self) -> UpdateProgress | None:
        """Return the last update that was started, which the unit no longer waits for."""
        update, self.update = self.update, None
        return update

    def end_step(self) -> None:
        """The step has ended: its parameters may be read again."""
        self.updated_early = False

    def written(self) -> None:
        """Record that the tier has the parameters of the buffer."""
        self.is_dirty = False

    def note_fingerprint(self, fingerprint: Fingerprint | None) -> None:
        """Record the fingerprint of the bytes in the tiers; None: unknown."""
        self.fingerprint = fingerprint

    def pin(self) -> None:
        self.pin_count += 1

    def unpin(self) -> None:
        self.pin_count -= 1

    def bind(self, views: list[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> None:
        """Record that the parameters view the buffer. views: as of `views`; [] if they view none."""
        self.bound = len(views)
        self.views = views or self.views

    def restore_steps(self, steps: Sequence[int]) -> None:
        """Replace the number of updates of each parameter, by slot."""
        self.steps = list(steps)

    def rewritten(self) -> None:
        """A load or a write to the tiers overwrote the parameters: earlier references are invalid."""
        self.overwritten()
        torch.autograd.graph.increment_version(self.parameters)

    def begin_update(self, update: UpdateProgress, *, early: bool, writes: bool) -> None:
        """Record that an update of the parameters is submitted. early: before `engine.step()`. writes: to the tier."""
        self.update, self.due_update = update, None
        self.is_dirty = not writes
        self.updated_early = early
        self.overwritten()

    def take_back(self) -> None:
        """Undo `begin_update`: the tiers have the parameters of before."""
        self.generation -= 1
        self.updated_early = False

    def postpone(self, job: UpdateJob) -> None:
        """Leave an update to the unit's next use."""
        self.due_update = job

    def overwritten(self) -> None:
        """Record that the parameters in the tiers are being overwritten."""
        self.generation += 1
        self.fingerprint = None

    def present_update(self) -> UpdateProgress | None:
        """Return the update that is due, else the last one that was started."""
        return self.update if self.due_update is None else self.due_update.progress

    def trained(self) -> list[bool]:
        """Return the current requires_grad of each parameter, by slot."""
        with torch._C.DisableTorchFunctionSubclass():
            return [parameter.requires_grad for parameter in self.parameters]

    @property
    def references(self) -> int:
        """Number of tensors of the unit that autograd saved and may still unpack.

        Uses the interpreter's reference count, since a Ctrl-C during `__del__` would be lost.
        """
        return sys.getrefcount(self.token) - self._without_references

    def move(self, to: Residency) -> None:
        if (self.residency, to) not in TRANSITIONS:
            raise ResidencyError(f"internal error: unit {self.name} cannot go from {self.residency.name} to {to.name}")
        self.residency = to

    def flat(self) -> torch.Tensor:
        """Return the unit's flat tensor (numel,) in its leased buffer."""
        assert self.lease is not None
        return self.lease.flat(self.layout.dtype, self.layout.numel)

    def shard_bytes(self, rank: int) -> torch.Tensor:
        """Return the shard of `rank` in the leased buffer: uint8 (shard_nbytes,)."""
        assert self.lease is not None
        if self.layout.shard_nbytes == self.lease.nbytes:
            return self.lease.tensor
        return self.layout.shard_of(self.lease.tensor, rank)

    def write_after(self, transfer: Transfer) -> None:
        """Let writes to the unit's tiers wait for `transfer` as well, and not happen if it fails."""
        self.snapshot_read = also(self.snapshot_read, transfer)

    def forget_saves(self) -> None:
        """Let writes to the unit's tiers wait for no save or commit."""
        self.snapshot_read = DONE

    def check_frozen(self) -> None:
        """Raise UsageError if a parameter that was frozen at the construction of the engine now requires a gradient.

        Without a graph it may: peft's `set_adapter` asks for gradients, also for a reference pass.
        """
        if self.layout.trainable or not torch.is_grad_enabled():
            return
        unfrozen = {id(t) for each in self.wrappers if each.requires_grad for _, t in inner(each)}
        for slot, parameter, trained in zip(self.layout.slots, self.parameters, self.trained(), strict=True):
            if trained or id(parameter) in unfrozen:
                raise UsageError(
                    f"{slot.name} was frozen when the engine was made, which keeps no gradient and no optimizer states "
                    "for it, and now requires a gradient. To train it, close the engine with "
                    "engine.close(restore=True) and make a new one. Parameters that were trained when it was made can "
                    "be frozen and unfrozen at any time."
                )

    def is_viewed(self) -> bool:
        """Return True if anything other than the unit's parameters refers to its buffer."""
        assert self.lease is not None
        return self.lease.is_referenced(beyond=len(self.parameters))


class Moves:
    """Moves of one engine's units between tiers and buffers. The error of one stops the engine."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.failure: OSError | ForcedInterrupt | RanksError | UpdateError | UsageError | None = None
        """Data did not arrive, or an edit is lost, so the engine must not continue from this state."""

    def moving(self) -> AbstractContextManager[None]:
        """Move units in the block: an error there stops the engine, and Ctrl-C waits for the end of the block."""
        return _Moving(self)

    def fail(self, error: OSError | ForcedInterrupt | RanksError | UpdateError | UsageError) -> None:
        """Stop the engine because of the error of a transfer, or of an edit that must not be written."""
        self.failure = error

    def await_update(self, update: UpdateProgress | None) -> None:
        """Wait until an update is written. No-op for None."""
        if update is not None:
            if update.done.done():
                update.done.wait()  # raises its error
                return
            with self.recorder.wait("update", "update"):
                update.done.wait()


class _Moving(AbstractContextManager[None]):
    """See `Moves.moving`. A class, since a generator takes three times as long, once a unit."""

    __slots__ = ("_modes", "_moves", "_uninterrupted")

    def __init__(self, moves: Moves) -> None:
        self._moves, self._uninterrupted = moves, uninterrupted()

    def __enter__(self) -> None:
        self._uninterrupted.__enter__()
        try:
            self._modes = outside_modes()
            self._modes.__enter__()
        except BaseException:
            self._uninterrupted.__exit__(*sys.exc_info())
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError | ForcedInterrupt | RanksError | UpdateError):
            self._moves.fail(error)
        try:
            self._modes.__exit__(kind, error, trace)
        finally:
            self._uninterrupted.__exit__(kind, error, trace)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
