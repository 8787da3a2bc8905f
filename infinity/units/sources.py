"""Parameters whose values are to be read, and where: noted before there is an engine, asked for when it is made."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


class Source(Protocol):
    """The value of one parameter."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of it flattened, (stop - start,), on the host in any dtype."""
        ...


# Keyed by the parameter itself: it stays what it is when its model becomes part of another module.
_sources = WeakIdKeyDictionary()
_loaded = WeakIdKeyDictionary()


def note_source(parameter: nn.Parameter, source: Source) -> None:
    """`parameter`, on the meta device, is to have the values that `source` gives."""
    _sources[parameter] = source


def source_of(parameter: nn.Parameter) -> Source | None:
    found: Source | None = _sources.get(parameter)
    return found


def note_loaded(buffer: torch.Tensor) -> None:
    """`buffer` has its values: initialising its module must not change them."""
    _loaded[buffer] = True


def is_loaded(buffer: torch.Tensor) -> bool:
    return buffer in _loaded
