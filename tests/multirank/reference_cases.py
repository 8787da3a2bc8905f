"""Cases of two ranks with engines without an optimizer, and with the names of stage 3's parameters."""

from __future__ import annotations

from typing import Any

import torch
from infinity.deepspeed.runtime.zero import ZeroParamStatus
from infinity.deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint

import infinity.deepspeed as deepspeed
from support.models import Stack, seeded, token_batches


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


def made_plain(rank: int, *, folder: str) -> dict[str, Any]:
    """Save a trained model that shares its head, and load the checkpoint into it while its engine is open."""
    place = {"device": "nvme", "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "steps_per_print": 0,
        "infinity": {"unit_size": 20_000},
    }
    engine, *_ = deepspeed.initialize(model=seeded(lambda: Stack(tied=True)), config=config)
    engine.backward(engine(*token_batches(1)[0]))
    engine.step()
    engine.save_checkpoint(folder)
    values = dict(engine.training_engine.stream_state_dict())
    model = load_state_dict_from_zero_checkpoint(engine.module, folder)
    return {"values": values, "model": {name: value.clone() for name, value in model.state_dict().items()}}
