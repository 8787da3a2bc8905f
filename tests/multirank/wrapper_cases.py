"""Code of the ranks in test_wrappers.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import infinity
from infinity.tiers.device import CpuDevice
from multirank.cases import SAMPLES
from support.configs import engine_config
from support.loops import open_engine, parameters_of, train
from support.models import Linears, seeded, vector_batches
from support.quantised import adapted, dequantised, rows_twice

STEPS = 3
MAKERS = {"quantised": partial(adapted, rows_twice), "dequantised": partial(dequantised, rows_twice)}


def trained(rank: int, *, kind: str, folder: str, save: str = "", **options: Any) -> dict[str, Any]:
    """Train on batches of this rank. Its initial values differ from rank 0's, which the engine takes. save: there."""
    model: Linears = seeded(MAKERS[kind], rank)
    with open_engine(model, engine_config(folder=folder, micro=SAMPLES, **options)) as engine:
        losses = train(engine, vector_batches(STEPS, seed=rank))
        if save:
            engine.save_checkpoint(save)
            engine.load_checkpoint(save)
        values = {name: v for name, v in parameters_of(engine).items() if ".base.weight" not in name}
        bases = {name: v for name, v in engine.state_dict().items() if ".base.weight" in name}
        engine.close(restore=True)
    weights = {name: value + 0 for name, value in bases.items()}
    for name, weight in model.named_parameters():
        assert name not in weights or torch.equal(weight + 0, weights[name])
    return {"losses": losses, "values": values, "weights": weights}


def generated(rank: int, *, folder: str) -> bool:
    """Return whether each forward of an inference engine has the plain model's result."""
    batches = vector_batches(2, seed=rank)
    expected = [seeded(MAKERS["quantised"])(*batch) for batch in batches]
    config = engine_config(folder=folder, prefetch_bytes=0)
    with (
        infinity.init_inference(seeded(MAKERS["quantised"], rank), config, device=CpuDevice()) as engine,
        torch.no_grad(),
    ):
        return all(torch.equal(engine(*batch), value) for batch, value in zip(batches, expected, strict=True))
