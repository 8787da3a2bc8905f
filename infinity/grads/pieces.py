"""Pieces of a gradient shard, in which the host adds, converts or sums it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.plan.layout import Part
from infinity.update.kernels import SUM_TILE

Piece = tuple[int, int]
"""Elements [start, stop) of a shard."""


def cut(parts: Sequence[Part], numel: int, most: int) -> tuple[Piece, ...]:
    """Cut a shard of `numel` elements into pieces of at most `most` elements.

    parts: of the shard. most: at least `SUM_TILE`. A part is cut only at multiples of `SUM_TILE` from its start, so
    that its sum of squares, continued from piece to piece, has the same bits as in one pass.
    """
    # Cuts follow the tiles of each part, since a sum continued elsewhere would round differently [Note: the gradient
    # norm].
    starts = [part.start for part in parts] or [0]
    cuts = [0]
    for start, end in zip(starts, [*starts[1:], numel], strict=True):
        while end - cuts[-1] > most:
            cuts.append(start + (cuts[-1] + most - start) // SUM_TILE * SUM_TILE)
    return tuple(zip(cuts, [*cuts[1:], numel], strict=True))
