"""Code of ranks that train and generate with experts, which their tokens choose differently."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from infinity.config import Config
from infinity.nn import TiledExperts, experts, tile
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.experts import MODELS, batches
from support.hugging_face import loss_of
from support.loops import Batches, LossOf, open_engine, train
from support.models import seeded

LIMIT = 3 * 32 * 32 * 4


def model_of(max_bytes: int, frozen: bool = False) -> Any:
    """max_bytes: of a tile; 0: no tiles."""
    model: Any = seeded(MODELS["mixtral"])
    freeze(model, frozen)
    if max_bytes:
        tile(model, max_bytes)
    return model


def freeze(model: nn.Module, frozen: bool) -> None:
    for module in model.modules():
        if experts.is_fused(module):
            module.requires_grad_(not frozen)


def trained(rank: int, *, folder: str, max_bytes: int, target: Path, frozen: bool, **options: Any) -> Any:
    """Return losses, the experts that this rank's tokens chose in each call, and the state dict of a resumed run.

    frozen: experts are frozen.
    """
    config = engine_config(folder=folder, micro=2, unit_size=20_000, **options)
    steps = batches(4, seed=10 * rank, length=2)
    return resumed(lambda: model_of(max_bytes, frozen), steps, loss_of, config, target)


def family_trained(
    rank: int, *, folder: str, family: str, share: float, target: Path, frozen: bool, **options: Any
) -> Any:
    """`trained` for a family of the zoo. share: of a layer's experts that is a tile; 0: no tiles."""
    from zoo.families import nbytes_of, tiled, with_batches
    from zoo.models import loss_of, seed_all

    whole, _ = with_batches(family, 1)
    freeze(whole, frozen)
    size = nbytes_of(whole, share or 0.5)
    config = engine_config(folder=folder, micro=2, unit_size=size + 4096, **options)
    generator = torch.Generator().manual_seed(10 + 20 * rank)
    tokens = [torch.randint(3, 100, (1, 2), generator=generator) for _ in range(4)]
    steps = [({"input_ids": each, "labels": each},) for each in tokens]
    seed_all(7)
    return resumed(lambda: tiled(whole, size) if share else copy.deepcopy(whole), steps, loss_of, config, target)


def resumed(make: Callable[[], nn.Module], steps: Batches, loss_of: LossOf, config: Config, target: Path) -> Any:
    """Return losses, chosen experts and states of a training; check that it goes on from its middle."""
    model = make()
    chosen: list[list[int]] = []
    for module in model.modules():
        if isinstance(module, TiledExperts) or experts.is_fused(module):
            module.register_forward_pre_hook(lambda *call: chosen.append(chosen_in(*call)), with_kwargs=True)
    with open_engine(model, config) as engine:
        losses = train(engine, steps[:2], loss_of)
        engine.save_checkpoint(target, "middle")
        losses += train(engine, steps[2:], loss_of)
    with open_engine(make(), config) as engine:
        engine.load_checkpoint(target, "middle")
        assert train(engine, steps[2:], loss_of) == losses[2:]
        return losses, chosen, engine.state_dict()


def chosen_in(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the experts that rows are routed to in a call."""
    for given in (*args, *kwargs.values()):
        if isinstance(given, list):  # numbers of rows
            return [expert for expert, rows in enumerate(given) if rows]
        if not given.is_floating_point():
            return sorted(set(given.flatten().tolist()))
    number = sum(module.counts) if isinstance(module, TiledExperts) else module.num_experts
    rows = args[0].view(number, -1).any(1)  # of a dense class: zeros where a token chose others
    return [int(expert) for expert in rows.nonzero()]


def generated(rank: int, *, folder: str, param: str) -> tuple[list[int], list[int]]:
    """Return texts of the engine and of the plain model."""
    tokens = torch.randint(3, 61, (1, 4), generator=torch.Generator().manual_seed(rank))
    how = {"max_new_tokens": 4 + 2 * rank, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    expected = model_of(0).eval().generate(tokens, **how)
    config = engine_config(param, "none", folder=folder, unit_size=20_000, prefetch_bytes=30_000)
    with infinity.init_inference(model_of(LIMIT).eval(), config, device=CpuDevice()) as engine:
        return engine.generate(tokens, **how)[0].tolist(), expected[0].tolist()
