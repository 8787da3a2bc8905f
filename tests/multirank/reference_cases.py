"""Cases of two ranks with engines without an optimizer, and with the names of stage 3's parameters."""

from __future__ import annotations

from typing import Any

import torch

import infinity.deepspeed as deepspeed
from infinity.deepspeed.runtime.zero import ZeroParamStatus
from support.models import Stack, seeded


def saved(rank: int, *, stage: int, folder: str) -> dict[str, Any]:
    """Save a reference model, load it into another one, and return its values and its parameters' names."""
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "steps_per_print": 0}
    config["infinity"] = {"unit_size": 20_000}
    engine, *_ = deepspeed.initialize(model=seeded(Stack, seed=1), config=config)
    other, *_ = deepspeed.initialize(model=seeded(Stack), config=config)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    path, client_state = other.load_checkpoint(folder)
    seen: dict[str, Any] = {
        "batch": other.get_batch_info(),
        "path": path,
        "client_state": client_state,
        "states": dict(other._engine.stream_state_dict()),
    }
    if stage == 3:
        weight = other.module.head.weight
        statuses = [weight.ds_status]
        with deepspeed.zero.GatheredParameters([weight]):
            statuses.append(weight.ds_status)
            seen["whole"] = weight.detach().clone()
        seen["available"] = [status is ZeroParamStatus.AVAILABLE for status in statuses]
        seen["sizes"] = [(p.ds_numel, p.partition_numel(), p.ds_tensor.numel()) for p in other.module.parameters()]
        seen["group"] = torch.distributed.get_world_size(weight.ds_process_group)
    engine.destroy()
    other.destroy()
    return seen
