"""Code of the ranks in test_vertical.py: steps of `engine.train_batch`."""

from __future__ import annotations

import random
from typing import Any

import torch

from infinity.engine.training import TrainingEngine
from infinity.errors import InfinityError
from infinity.tiers.device import CpuDevice
from multirank.cases import SAMPLES, global_batches, part
from support.configs import engine_config
from support.models import Stack, seeded

STEPS, MICRO_BATCHES = 3, 3


def trained(rank: int, *, batched: bool, tied: bool = False, **options: Any) -> dict[str, Any]:
    """Train on this rank's part of each batch. batched: with `train_batch`, in vertical order."""
    config = engine_config(accumulation=MICRO_BATCHES, unit_size=20_000, micro=SAMPLES, **options)
    losses, sent = [], []
    with TrainingEngine(seeded(lambda: Stack(tied=tied)), config, device=CpuDevice()) as engine:
        batches = iter([part(batch, rank) for batch in global_batches(STEPS * MICRO_BATCHES, SAMPLES * 2)])
        for _ in range(STEPS):
            before = engine.ledger.snapshot()
            if batched:
                losses.append(engine.train_batch(batches, blocks=engine.module.blocks).item())
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
        return {
            "losses": losses,
            "norm": engine.grad_norm,
            "values": dict(engine.stream_state_dict()),
            "gathered": sent,
        }


class Deviates(Stack):
    """Breaks the promise of `blocks` in one way."""

    way = ""
    seen = 0

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        blocks = list(self.blocks)
        if self.way == "order":
            blocks[3:5] = reversed(blocks[3:5])
        if self.way == "random":
            random.random()
        first = x
        for block in blocks:
            x = block(x)
        if self.way == "shared":
            self.seen += 1
            x = x * self.seen
        if self.way == "skip":
            x = x + first
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def refused(rank: int, *, way: str, ranks: list[int], step: int, **options: Any) -> dict[str, str]:
    """Train; from a step on, some ranks break the promise in one way. Returns the errors of that step and of the next
    one."""
    config = engine_config(accumulation=MICRO_BATCHES, unit_size=20_000, micro=SAMPLES, **options)
    batches = iter([part(batch, rank) for batch in global_batches(STEPS * MICRO_BATCHES, SAMPLES * 2)])
    found = []
    with TrainingEngine(seeded(Deviates), config, device=CpuDevice()) as engine:
        for _ in range(step):
            engine.train_batch(batches, blocks=engine.module.blocks)
        if rank in ranks:
            engine.module.way = way
            if way == "hook":
                engine.module.register_forward_hook(lambda *_: None)
        for _ in range(2):
            try:
                engine.train_batch(batches, blocks=engine.module.blocks)
            except InfinityError as error:
                found.append(f"{type(error).__name__}: {error}")
        return {"first": found[0], "second": found[1], "steps": str(engine.global_steps)}
