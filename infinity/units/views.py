"""Buffers of released units with live views.

In a plain loop a view of a parameter (`self.flat = self.weight.view(-1)`, `p.data` in a list) shows the values that
the optimizer writes. So the unit keeps the buffer behind the view and is fetched into it again. The pool allocates a
fresh buffer instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeptBuffer:
    """buffer: uint8 (nbytes,), with live views. generation, fingerprint: the unit's values when it was released."""

    buffer: torch.Tensor
    generation: int
    fingerprint: int | None
