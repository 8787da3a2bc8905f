"""Code of the ranks in test_gradients.py: sums, averages and norms of gradients in `infinity.deepspeed`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

import infinity.deepspeed as deepspeed
from multirank.cases import SAMPLES, global_batches, part
from support.models import Stack, seeded

STEPS = (3, 1, 2)
"""Micro-batches of each step."""


def trained(rank: int, *, stage: int, way: str, update: str = "auto", **top: Any) -> dict[str, Any]:
    """Train on this rank's part of every batch. way: how steps get their number of micro-batches.

    Returns the norms, the gradient of one weight as averaged for the last step, and the values at the end.
    """
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "steps_per_print": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "infinity": {"unit_size": 20_000, "update": update, "cache_bytes": 1 << 30},
        **top,
    }
    engine, *_ = deepspeed.initialize(model=seeded(lambda: Stack(depth=3)), config=config)
    batches = iter(global_batches(sum(STEPS), SAMPLES * 2))
    norms, gradient = [], None
    for size in STEPS:
        for number in range(size):
            is_last = number == size - 1
            if way in ("boundary", "plain"):
                engine.set_gradient_accumulation_boundary(is_last)
            with engine.no_sync() if way == "no_sync" and not is_last else nullcontext():
                loss = engine(*part(next(batches), rank))
                loss.backward() if way == "plain" else engine.backward(loss)
        if update != "auto":
            gradient = deepspeed.utils.safe_get_full_grad(engine.module.head.weight)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    values = dict(engine.training_engine.stream_state_dict())
    engine.destroy()
    return {"norms": norms, "gradient": gradient, "values": values}


def plainly(factor: float) -> dict[str, Any]:
    """Train on the batches of both ranks, with each loss multiplied by `factor`."""
    model = seeded(lambda: Stack(depth=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(global_batches(sum(STEPS), SAMPLES * 2))
    norms, gradient = [], None
    for size in STEPS:
        for _ in range(size):
            (model(*next(batches)) * factor).backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        assert model.head.weight.grad is not None
        gradient = model.head.weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "gradient": gradient, "values": {n: p.detach() for n, p in model.named_parameters()}}
