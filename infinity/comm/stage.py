"""The stages of ZeRO (Rajbhandari et al. 2020): of what every rank holds a part, and of what a whole copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stage = Literal[0, 1, 2, 3]


@dataclass(frozen=True)
class Sharding:
    """Whether a rank holds its shard of optimizer states, of gradients that accumulate, and of parameters, or all.

    What is not sharded is in the device's memory: parameters stay there from step to step, gradients from the first
    micro-batch of a step to the last.
    """

    optim: bool
    grads: bool
    params: bool

    @classmethod
    def of(cls, stage: Stage) -> Sharding:
        """0: plain data parallelism. 1: optimizer states are sharded. 2: gradients too. 3: parameters too."""
        return cls(stage >= 1, stage >= 2, stage >= 3)
