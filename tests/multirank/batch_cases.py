"""First batches of ranks. This function runs in the processes of a `support.ranks.Group`."""

from __future__ import annotations

import logging

import torch
from torch import nn

from support.configs import engine_config
from support.loops import open_engine
from support.models import seeded


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


class Padded(nn.Module):
    """A model that takes a batch and its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def warned(rank: int, *, batches: str, folder: str, stage: int, accumulation: int = 1) -> list[str]:
    """Train two steps. Returns this rank's warnings about batches.

    batches: of each rank, "same", "distinct", "zeros" (the same), or "later same" (distinct in the first step only).
    """
    lines = _Lines()
    logger = logging.getLogger("infinity")
    logger.addHandler(lines)
    places = {} if stage == 3 else {"param": "none", "optim": "cpu"}
    try:
        config = engine_config(**places, folder=folder, stage=stage, accumulation=accumulation, unit_size=100)
        with open_engine(seeded(Padded), config) as engine:
            with torch.no_grad():
                engine(torch.ones(4, 8))  # no training
            for step in range(2 * accumulation):
                own = rank if batches == "distinct" or (batches == "later same" and step == 0) else 0
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + own))
                engine.backward(engine(torch.zeros(4, 8) if batches == "zeros" else x, mask=torch.ones(4)))
                engine.step()
    finally:
        logger.removeHandler(lines)
    return [line for line in lines.found if "batches" in line]
