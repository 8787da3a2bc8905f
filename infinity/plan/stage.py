"""ZeRO stages (Rajbhandari et al. 2020): which states are sharded and which are replicated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stage = Literal[0, 1, 2, 3]


@dataclass(frozen=True)
class Sharding:
    """True for each kind of state that is sharded over ranks: optimizer states, accumulated gradients, parameters.

    Replicated states are in device memory: parameters stay there from step to step, gradients from the first
    micro-batch of a step to the last.
    """

    optim: bool
    grads: bool
    params: bool

    @classmethod
    def of(cls, stage: Stage) -> Sharding:
        """Stage 0: plain data parallelism. 1: optimizer states are sharded. 2: gradients too. 3: parameters too."""
        return cls(stage >= 1, stage >= 2, stage >= 3)
