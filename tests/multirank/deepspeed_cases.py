"""Code of the ranks in test_deepspeed.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import TensorDataset

import infinity.deepspeed as deepspeed
from infinity.deepspeed.runtime.zero import GatheredParameters
from multirank.cases import SAMPLES, global_batches, part
from support.models import Stack, seeded


def trained(rank: int, *, stage: int, folder: str) -> dict[str, Any]:
    """Train two steps on this rank's part of every batch, with two micro-batches a step; return what is observed."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "infinity": {"unit_size": 20_000},
    }
    data = TensorDataset(torch.arange(13))
    engine, _, loader, _ = deepspeed.initialize(model=seeded(Stack), training_data=data, config=config)
    for batch in global_batches(4, SAMPLES * 2):
        engine.backward(engine(*part(batch, rank)))
        engine.step()
    weight = engine.module.head.weight
    seen: dict[str, Any] = {
        "sizes": (engine.world_size, engine.dp_world_size, engine.global_rank, engine.train_batch_size()),
        "counts": (engine.global_steps, engine.global_samples, engine.micro_steps),
        "norm": engine.get_global_grad_norm(),
        "samples": torch.cat([row[0] for row in loader]).tolist(),
        "saved": engine.save_16bit_model(folder),
        "states": values_of(engine),
    }
    if stage == 3:
        utils = deepspeed.utils
        local = utils.safe_get_local_fp32_param(weight)
        seen["local"] = local.clone()
        utils.safe_set_local_fp32_param(weight, torch.full_like(local, float(rank)))
        seen["set"] = utils.safe_get_full_fp32_param(weight)
    with GatheredParameters(engine.module.head.parameters(), modifier_rank=1):
        if rank == 1:
            torch.nn.init.constant_(weight, 5.0)
    seen["edited"] = values_of(engine)["head.weight"]
    engine.destroy()
    return seen


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return the model's values, unsharded."""
    return dict(engine.training_engine.stream_state_dict())
