"""Registry of sources that parameters on the meta device are read from. Filled before the engine is made."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


class Source(Protocol):
    """Reader of one parameter's values."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the flattened parameter: (stop - start,), on the host, in any dtype."""
        ...


# Keyed by the parameter itself, since its name changes when its model becomes part of another module.
_sources = WeakIdKeyDictionary()
_loaded = WeakIdKeyDictionary()


def note_source(parameter: nn.Parameter, source: Source) -> None:
    """Register `source` as the origin of the values of `parameter`, which is on the meta device."""
    _sources[parameter] = source


def source_of(parameter: nn.Parameter) -> Source | None:
    found: Source | None = _sources.get(parameter)
    return found


def note_loaded(buffer: torch.Tensor) -> None:
    """Mark `buffer` as loaded: initialising its module must not change it."""
    _loaded[buffer] = True


def is_loaded(buffer: torch.Tensor) -> bool:
    return buffer in _loaded
