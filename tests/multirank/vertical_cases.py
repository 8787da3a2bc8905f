"""Code of the ranks in test_vertical.py: steps of `engine.train_batch`."""

from __future__ import annotations

from typing import Any

import torch

from infinity.engine.training import TrainingEngine
from infinity.tiers.device import CpuDevice
from multirank.cases import SAMPLES, global_batches, part
from support.configs import engine_config
from support.models import Stack, seeded

STEPS, MICRO_BATCHES = 4, 3


class Deviates(Stack):
    """Rank 1 runs the blocks beside one another in one micro-batch."""

    skips = False

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().forward(tokens, targets)
        if self.skips:
            self.last = loss.detach()
        return loss


def trained(rank: int, *, batched: bool, tied: bool = False, deviates: bool = False, **options: Any) -> dict[str, Any]:
    """Train on this rank's part of each batch. batched: with `train_batch`. deviates: rank 1 keeps a tensor from the
    third step on."""
    config = engine_config(accumulation=MICRO_BATCHES, unit_size=20_000, micro=SAMPLES, **options)
    losses, sent = [], []
    with TrainingEngine(seeded(lambda: Deviates(tied=tied)), config, device=CpuDevice()) as engine:
        batches = iter([part(batch, rank) for batch in global_batches(STEPS * MICRO_BATCHES, SAMPLES * 2)])
        for step in range(STEPS):
            before = engine.ledger.snapshot()
            engine.module.skips = deviates and rank == 1 and step >= 2
            if batched:
                losses.append(engine.train_batch(batches).item())
            else:
                total: Any = None
                for _ in range(MICRO_BATCHES):
                    loss = engine(*next(batches))
                    engine.backward(loss)
                    engine.step()
                    total = loss.detach() if total is None else total + loss.detach()
                losses.append((total / MICRO_BATCHES).item())
            engine.settle()
            sent.append((engine.ledger.snapshot() - before).all_gather_bytes)
        trainer = engine._batches
        return {
            "losses": losses,
            "norm": engine.grad_norm,
            "values": dict(engine.stream_state_dict()),
            "vertical": trainer._order is not None and trainer._order._has_run and not trainer.reason,
            "gathered": sent,
        }
