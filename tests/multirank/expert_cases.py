"""Code of ranks that train and generate with experts, which their tokens choose differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.nn import tile
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.experts import MODELS, batches
from support.hugging_face import loss_of
from support.loops import open_engine, train
from support.models import seeded

LIMIT = 3 * 32 * 32 * 4


def model_of(max_bytes: int, frozen: bool = False) -> Any:
    """max_bytes: of a tile; 0: no tiles."""
    model: Any = seeded(MODELS["mixtral"])
    for layer in model.model.layers:
        layer.mlp.experts.requires_grad_(not frozen)
    if max_bytes:
        tile(model, max_bytes)
    return model


def trained(rank: int, *, folder: str, max_bytes: int, target: Path, frozen: bool, **options: Any) -> Any:
    """Return losses, the experts that this rank's tokens chose in each call, and the state dict of a resumed run.

    frozen: experts are frozen.
    """
    config = engine_config(folder=folder, micro=2, unit_size=20_000, **options)
    steps = batches(4, seed=10 * rank, length=2)
    chosen: list[list[int]] = []
    model = model_of(max_bytes, frozen)
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: chosen.append(given[1].unique().tolist()))
    with open_engine(model, config) as engine:
        losses = train(engine, steps[:2], loss_of)
        engine.save_checkpoint(target, "middle")
        losses += train(engine, steps[2:], loss_of)
    with open_engine(model_of(max_bytes, frozen), config) as engine:
        engine.load_checkpoint(target, "middle")
        assert train(engine, steps[2:], loss_of) == losses[2:]
        return losses, chosen, engine.state_dict()


def generated(rank: int, *, folder: str, param: str) -> tuple[list[int], list[int]]:
    """Return texts of the engine and of the plain model."""
    tokens = torch.randint(3, 61, (1, 4), generator=torch.Generator().manual_seed(rank))
    how = {"max_new_tokens": 4 + 2 * rank, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    expected = model_of(0).eval().generate(tokens, **how)
    config = engine_config(param, "none", folder=folder, unit_size=20_000, prefetch_bytes=30_000)
    with infinity.init_inference(model_of(LIMIT).eval(), config, device=CpuDevice()) as engine:
        return engine.generate(tokens, **how)[0].tolist(), expected[0].tolist()
