"""Buffers of released units that somebody still views.

In a plain loop a view of a parameter (`self.flat = self.weight.view(-1)`, `p.data` in a list) shows the values that
the optimizer writes. So the buffer that it refers to is kept with the unit and used again when the unit is fetched; the
pool gets a fresh one in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeptBuffer:
    """buffer: uint8, viewed by somebody. generation, fingerprint: those of the unit when it was released."""

    buffer: torch.Tensor
    generation: int
    fingerprint: int | None
