"""Description of a model's units before layout: names, shapes and dtypes, without parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Member:
    """One parameter of a unit."""

    name: str
    shape: tuple[int, ...]
    """Shape of this rank's part, if tensor parallelism divides the parameter."""
    group: int = -1
    """Index of its param_group; -1: not trained."""
    copies: int = 1
    """Number of tensor-parallel ranks that hold the same values."""


@dataclass(frozen=True)
class DiscoveredUnit:
    """Parameters of one dtype, all trainable or all frozen."""

    name: str
    dtype: torch.dtype
    trainable: bool
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Discovered:
    """All units of a model, in the order of the module tree."""

    units: tuple[DiscoveredUnit, ...]
    held_together: frozenset[frozenset[int]] = field(default_factory=frozenset)
    """Sets of units (indices) that nested modules hold at once."""
    blocks: frozenset[frozenset[int]] = field(default_factory=frozenset)
    """Units (indices) of each repeated block that contains no other."""
