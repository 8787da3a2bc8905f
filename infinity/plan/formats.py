"""State formats: the optimizer states of a parameter, and their bytes; dtypes of gradients from `.grad` to the update.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal, NamedTuple, TypeVar

import torch

from infinity.rules import RULES, MomentFormat, RuleName

RECORD_ALIGNMENT = 4096
"""Alignment in bytes of a tile's states, as direct I/O requires."""

BLOCK = 256
"""Number of elements of an 8-bit moment that share a scale."""
FORMATS: dict[MomentFormat, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
"""Format of moments → dtype of their values or codes."""

MASTERS = ("remainder", "master")
"""States from which the fp32 master of a 16-bit parameter follows."""
MasterFormat = Literal["remainder", "fp32"]
T = TypeVar("T")


@dataclass(frozen=True)
class StateKind:
    """One state. per: number of elements that share a value (`BLOCK` for scales). shape: of a state with a shape of its
    own (`infinity.plan.records`); None: the parameter's, or one value for `per` elements.
    """

    name: str
    dtype: torch.dtype
    per: int = 1
    shape: tuple[int, ...] | None = None

    def length(self, n: int) -> int:
        """Return the number of values for n elements."""
        return -(-n // self.per)

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in which the state of a parameter of `shape` is saved: the parameter's, its own, or
        (scales,) for scales of a block format.
        """
        if self.shape is not None:
            return self.shape
        return shape if self.per == 1 else (self.length(prod(shape)),)

    def part(self, start: int, stop: int) -> slice:
        """Return the slice of the values of elements [start, stop); `start` is a multiple of `per`."""
        return slice(start // self.per, self.length(stop))


@dataclass(frozen=True)
class Range:
    """Byte range of a state in a tile: [first, first + nbytes)."""

    kind: StateKind
    first: int
    nbytes: int

    def of(self, record: torch.Tensor) -> torch.Tensor:
        """Return a view of the state's values in a tile's bytes, uint8 (nbytes,)."""
        return record[self.first : self.first + self.nbytes].view(self.kind.dtype)


@dataclass(frozen=True)
class StateFormat:
    """States of parameters of one dtype: `remainder` (int16), `master` (fp32) or neither, and the moments."""

    states: tuple[StateKind, ...]

    @property
    def bytes_per_element(self) -> float:
        return sum(kind.dtype.itemsize / kind.per for kind in self.states)

    def ranges(self, n: int) -> dict[str, Range]:
        """Return state name → byte range in a tile of n elements. States are contiguous, in order."""
        found: dict[str, Range] = {}
        position = 0
        for kind in self.states:
            nbytes = kind.length(n) * kind.dtype.itemsize
            found[kind.name] = Range(kind, position, nbytes)
            position += nbytes
        return found

    def nbytes(self, n: int) -> int:
        """Return the bytes of a tile of n elements, a multiple of `RECORD_ALIGNMENT`."""
        used = sum(kind.length(n) * kind.dtype.itemsize for kind in self.states)
        return -(-used // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


@cache
def state_format(dtype: torch.dtype, master: MasterFormat, rule: RuleName, moments: MomentFormat) -> StateFormat:
    """Return the state format of parameters of `dtype`: fp32 (their own masters), bf16 or fp16.

    master: applies to bf16 only; the master of fp16 is fp32.
    """
    kept: tuple[StateKind, ...] = ()
    if dtype == torch.bfloat16 and master == "remainder":
        kept = (StateKind(MASTERS[0], torch.int16),)
    elif dtype != torch.float32:
        kept = (StateKind(MASTERS[1], torch.float32),)
    return StateFormat((*kept, *moment_kinds(rule, moments)))


def moment_kinds(rule: RuleName, moments: MomentFormat) -> tuple[StateKind, ...]:
    """Return the states of a rule's moments: named as in torch.optim, or 8-bit codes and scales."""
    names = RULES[rule].moments
    if moments != "8bit":
        return tuple(StateKind(name, FORMATS[moments]) for name in names)
    codes = tuple(StateKind(f"{name}_8bit", torch.uint8) for name in names)
    return codes + tuple(StateKind(f"{name}_scale", torch.uint8, BLOCK) for name in names)


def moments_in(rule: RuleName, states: Mapping[str, T]) -> tuple[list[T], list[T]]:
    """Return (moments, scales) from states by name. scales is empty unless moments are 8-bit."""
    names = RULES[rule].moments
    if names[0] in states:
        return [states[name] for name in names], []
    return [states[f"{name}_8bit"] for name in names], [states[f"{name}_scale"] for name in names]


class GradDtypes(NamedTuple):
    """Dtypes for the gradients of parameters of one dtype."""

    collected: torch.dtype
    """Dtype in a whole unit's buffer, where gradients arrive."""
    reduced: torch.dtype
    """Dtype of the sum over ranks."""
    stored: torch.dtype
    """Dtype of a shard in its tier, and of the sum over micro-batches there."""


def grad_dtypes(
    own: torch.dtype,
    *,
    communication: torch.dtype | None,
    accumulation: torch.dtype,
    summed: bool,
    exchanged: bool,
    whole: bool,
) -> GradDtypes:
    """Return the dtypes of gradients of parameters of dtype `own`.

    communication, accumulation: dtypes of the sums over ranks (None: `own`) and over micro-batches. summed: gradients
    are summed over micro-batches. exchanged: gradients are reduced over ranks. whole: gradients are summed over
    micro-batches before they are reduced.

    Only the two sums round. Without a sum over micro-batches gradients are stored in the reduced dtype. Without ranks
    they are collected in their own dtype if the sum represents it exactly, and in the dtype of the sum otherwise, or if
    they are summed where they are collected.
    """
    reduced = communication or own
    if not summed:
        only = reduced if exchanged else own
        return GradDtypes(only, only, only)
    if not exchanged:
        leaving = own if accumulation == torch.float32 and not whole else accumulation
        return GradDtypes(leaving, leaving, accumulation)
    if whole:
        return GradDtypes(accumulation, reduced, reduced)
    return GradDtypes(reduced, reduced, accumulation)
