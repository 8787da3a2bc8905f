"""A unit at run time: its parameters, where they are now, and the moves that are allowed."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.errors import LifetimeError, ResidencyError
from infinity.tiers.pool import Lease
from infinity.tiers.transfer import DONE, Transfer
from infinity.units.layout import UnitLayout
from infinity.units.local import local, set_local

if TYPE_CHECKING:
    from infinity.optim.job import UpdateJob


class Residency(Enum):
    """Where a unit's parameters are."""

    RELEASED = "in its tier only; parameters show a placeholder of the right shape"
    FETCHING = "on the way into a leased device buffer"
    RESIDENT = "in a device buffer that its parameters view"
    UPDATING = "in a device buffer that the update is changing; parameters show the placeholder"


TRANSITIONS: frozenset[tuple[Residency, Residency]] = frozenset(
    {
        (Residency.RELEASED, Residency.FETCHING),
        (Residency.FETCHING, Residency.RESIDENT),
        # the fetch failed, or was ahead of a step that departed from its trace
        (Residency.FETCHING, Residency.RELEASED),
        (Residency.RESIDENT, Residency.RELEASED),
        (Residency.FETCHING, Residency.UPDATING),  # fetched for the next step before this one's update
        (Residency.RESIDENT, Residency.UPDATING),
        (Residency.RELEASED, Residency.UPDATING),  # updated before its first use in the next forward
        # what the update leaves is the unit, once other ranks' shards are gathered
        (Residency.UPDATING, Residency.FETCHING),
        (Residency.UPDATING, Residency.RELEASED),
    }
)

_placeholders: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One NaN expanded with stride 0 to `shape`: models read shapes and dtypes at run time, and autograd checks
    them.
    """
    key = (dtype, device)
    if key not in _placeholders:
        _placeholders[key] = torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)
    return _placeholders[key].expand(shape)


class Unit:
    """The parameters of one layout, and the device buffer that holds them while they are resident."""

    def __init__(self, layout: UnitLayout, parameters: list[nn.Parameter], device: torch.device) -> None:
        self.layout = layout
        self.parameters = parameters
        self.device = device
        self.residency = Residency.RELEASED
        self.lease: Lease | None = None
        self.transfer: Transfer | None = None
        self.holds = 0
        """Module forwards under way that need the unit."""
        self.token = object()
        """Held by every tensor that autograd saved out of the unit and may still ask for."""
        self._without_references = sys.getrefcount(self.token)
        self.generation = 0
        """Updates so far; a saved reference from before an update must not be served after it."""
        self.steps = [0] * len(parameters)
        """By slot, how often the parameter was updated: its bias correction follows that, not the model's steps."""
        self.job: UpdateJob | None = None
        self.pending_job: UpdateJob | None = None
        """An update that is due before the next use and has not been started."""
        self.copied: Transfer = DONE
        """Done when a save in the background has read the unit's states: nothing may be written to its tiers before."""
        self.exposed = False
        """Whether a parameter was read outside of the model's forward and backward: it may be edited through `.data`,
        which leaves no trace."""
        self.lent = False
        """Whether a parameter was handed out to code that runs outside of the modules that hold the unit, and may keep
        it: DeBERTa passes the weight of an embedding on to all its layers."""
        self._versions: list[int] = []
        self._referrers: list[int] = []
        self._accumulators: list[Any] = []
        """Kept so that every parameter is always referred to by one: a graph does, and that must not count."""
        self._lingering: list[int] = []
        """Addresses of parameters that are left what they were in a released buffer; empty: they are placeholders."""

    def advance(self, slots: Collection[int]) -> dict[int, int]:
        """Count one more update of these slots; slot → its number, from 1."""
        for slot in slots:
            self.steps[slot] += 1
        return {slot: self.steps[slot] for slot in slots}

    @property
    def references(self) -> int:
        """Tensors that autograd saved out of the unit and may still ask for.

        Counted by the interpreter and not in `__del__`, where a Ctrl-C would be lost.
        """
        return sys.getrefcount(self.token) - self._without_references

    @property
    def index(self) -> int:
        return self.layout.index

    @property
    def name(self) -> str:
        return self.layout.name

    def move(self, to: Residency) -> None:
        if (self.residency, to) not in TRANSITIONS:
            raise ResidencyError(f"internal error: unit {self.name} cannot go from {self.residency.name} to {to.name}")
        self.residency = to

    def flat(self) -> torch.Tensor:
        """The unit's flat tensor (numel,) in its leased buffer."""
        assert self.lease is not None
        return self.lease.flat(self.layout.dtype, self.layout.numel)

    def shard_bytes(self, rank: int) -> torch.Tensor:
        """This rank's shard of the leased buffer, uint8."""
        assert self.lease is not None
        nbytes = self.layout.shard_nbytes
        return self.lease.tensor[rank * nbytes : (rank + 1) * nbytes]

    def bind(self) -> None:
        """Make the parameters views of the leased buffer."""
        for parameter, view in self._views():
            set_local(parameter, view)
        del parameter  # it would count below
        if not self._accumulators:  # made here, as they remember the dtype
            edge = torch.autograd.graph.get_gradient_edge
            self._accumulators = [edge(parameter).node for parameter in self.parameters if parameter.requires_grad]
        self._versions = [parameter._version for parameter in self.parameters]
        if not (self._lingering and self.is_lent()):  # else the same code still has what it was lent
            self._referrers = self._count_referrers()
            self.lent = False
        self._lingering = []
        self.exposed = False

    def unbind(self) -> None:
        """Make the parameters placeholders."""
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            set_local(parameter, placeholder(slot.shape, self.layout.dtype, self.device))
        self._lingering = []
        self._versions = [parameter._version for parameter in self.parameters]

    def check_placeholders(self) -> None:
        """LifetimeError if a parameter was edited while it was a placeholder; the edit is gone then."""
        nowhere = placeholder((), self.layout.dtype, self.device)
        expected = self._lingering or [nowhere.data_ptr()] * len(self.parameters)
        changed = [
            slot.name
            for slot, parameter, version, pointer in zip(
                self.layout.slots, self.parameters, self._versions, expected, strict=True
            )
            if parameter._version != version or (local(parameter).data_ptr() != pointer and parameter.numel())
        ]
        if not changed and nowhere.is_floating_point() and nowhere.device.type == "cpu" and not nowhere.isnan():
            changed = ["a parameter"]  # through `.data`, which leaves no trace but in what all placeholders share
        if changed:
            nowhere.fill_(float("nan"))
            self.unbind()
            raise LifetimeError(
                f"{changed[0]} was changed while its unit was released, so the change is lost: parameters() hands out "
                "placeholders. Read a parameter as an attribute of its module (module.weight) right before the edit."
            )

    def edited(self) -> bool:
        """Whether parameters were changed since `bind`, or may have been; takes over data that a user assigned.

        Raises LifetimeError for data of another shape, which is dropped.
        """
        changed = self.exposed or any(p._version != v for p, v in zip(self.parameters, self._versions, strict=True))
        for (parameter, view), slot in zip(self._views(), self.layout.slots, strict=True):
            now = local(parameter).data
            if (now.data_ptr(), now.shape, now.stride()) == (view.data_ptr(), view.shape, view.stride()):
                continue
            set_local(parameter, view)
            if now.shape != view.shape:
                raise LifetimeError(
                    f"{slot.name} was given data of shape {list(now.shape)} while an engine has the model, where its "
                    f"shape is {list(view.shape)}: the data was dropped. Close the engine, change the model and make a "
                    "new one."
                )
            view.copy_(now.clone())  # which may be a view of the same memory
            changed = True
        return changed

    def _views(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter and its place in the leased buffer."""
        flat = self.flat()
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            yield parameter, flat[slot.offset : slot.stop].view(slot.shape)

    def linger(self) -> None:
        """Release the unit, but leave its parameters what they were: whoever was lent one goes on to use it."""
        self._versions = [parameter._version for parameter in self.parameters]
        self._lingering = [local(parameter).data_ptr() for parameter in self.parameters]

    @property
    def lingers(self) -> bool:
        """Whether the unit's parameters are left what they were in a buffer that it no longer has."""
        return bool(self._lingering)

    def is_lent(self) -> bool:
        """Whether code that was handed a parameter still has it: there are more references than when it was bound."""
        return self.lent and any(now > then for now, then in zip(self._count_referrers(), self._referrers, strict=True))

    def _count_referrers(self) -> list[int]:
        return [sys.getrefcount(parameter) for parameter in self.parameters]

    def is_viewed(self) -> bool:
        """Whether anything but the unit's own modules refers to its buffer or its parameters."""
        assert self.lease is not None
        return self.is_lent() or self.lease.is_referenced(beyond=len(self.parameters))
