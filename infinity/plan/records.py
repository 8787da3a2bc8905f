"""Records: the optimizer states of one whole parameter, whose shapes and dtypes an optimizer class chose. Pure.

A rule in Python (`infinity.optim.parameter_rule`) updates whole parameters. Their states need not have the parameter's
shape, so they are kept as bytes: the fp32 master of a 16-bit parameter, then each state. [Note: rules in Python]
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from infinity.plan.formats import StateKind

_ALIGNMENT = 64
"""Alignment of a state in bytes: that of torch's own tensors, on which the bits of a matrix product may depend."""


@dataclass(frozen=True)
class Field:
    """One state: bytes [first, first + nbytes) of a record."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int = 0
    is_number: bool = False
    """True for a Python number, which the optimizer keeps instead of a tensor."""
    on_host: bool = field(default=False, compare=False)
    """True for a tensor that the optimizer keeps in host memory, wherever it updates: a count of steps."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def kind(self) -> StateKind:
        """The state as a checkpoint saves it."""
        return StateKind(self.name, self.dtype, shape=self.shape)

    def of(self, record: torch.Tensor) -> torch.Tensor:
        """Return a view of the state in a record, uint8 (nbytes,)."""
        return record[self.first : self.first + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class States:
    """The states of a parameter after a number of updates. tree: their place in the optimizer's own dict."""

    fields: tuple[Field, ...]
    tree: Any = field(compare=False, default=None)


@dataclass(frozen=True)
class Record:
    """Format of one parameter's record.

    master: the fp32 master of a 16-bit parameter; None if the parameter is fp32. after: the states after the first
    update, the second, …; the last entry stays. Before the first update there is none but the master.
    """

    master: Field | None
    after: tuple[States, ...]
    step_nbytes: int = field(default=0, compare=False)
    """The most bytes that the class's tensors take at once during an update, beside the record."""

    def states(self, updates: int) -> States:
        """Return the states after a number of updates."""
        return self.after[min(updates, len(self.after)) - 1] if updates else States(())

    def field_of(self, kind: StateKind) -> Field:
        """Return the place of a state. Raises KeyError if the record has none like it."""
        if self.master is not None and kind.name == "master":
            return self.master
        for each in (each for states in self.after for each in states.fields):
            if (each.name, each.dtype, each.shape) == (kind.name, kind.dtype, kind.shape):
                return each
        raise KeyError(kind.name)

    def kinds(self, updates: int) -> tuple[StateKind, ...]:
        """Return the states that a checkpoint saves, the master first."""
        return (StateKind("master", torch.float32), *(each.kind for each in self.states(updates).fields))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the record, a multiple of `_ALIGNMENT`."""
        ends = [each.first + each.nbytes for states in self.after for each in states.fields]
        return _aligned(max([*ends, self.master.nbytes if self.master else 0]))


def record_of(shape: tuple[int, ...], after: tuple[States, ...], *, has_master: bool, step_nbytes: int = 0) -> Record:
    """Return the record of a parameter, with the fields of `after` placed one after the other.

    A state has the same place after each update.
    """
    master = Field("master", torch.float32, shape) if has_master else None
    first = _aligned(master.nbytes) if master else 0
    placed: dict[Field, Field] = {}
    for each in (each for states in after for each in states.fields):
        if each not in placed:
            placed[each] = replace(each, first=first)
            first = _aligned(first + each.nbytes)
    after = tuple(States(tuple(placed[each] for each in s.fields), s.tree) for s in after)
    return Record(master, after, step_nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
