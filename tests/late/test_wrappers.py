"""Frozen tensor subclasses follow their inner tensors to a device, and back when the engine is closed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from late.device import LateAccelerator
from support.configs import engine_config
from support.loops import open_engine, parameters_of, train, trained
from support.models import seeded, vector_batches
from support.quantised import Rows, adapted, rows_twice

BATCHES = vector_batches(3)


def test_wrappers_follow_their_inner_tensors(order: None) -> None:
    make, device = partial(adapted, rows_twice), LateAccelerator()
    expected = trained(seeded(make), BATCHES, engine_config(prefetch_bytes=0))
    model: Any = seeded(make)
    value = model.layers[1].base.weight.dequantize()
    with open_engine(model, engine_config(prefetch_bytes=0), device) as engine:
        weight = model.layers[1].base.weight
        assert weight.device == weight.codes.device == device.torch_device
        losses = train(engine, [tuple(each.to(device.torch_device) for each in batch) for batch in BATCHES])
        found = {name: each.cpu() for name, each in parameters_of(engine).items()}
        engine.close(restore=True)
    assert losses == expected.losses
    assert all(torch.equal(each, expected.parameters[name]) for name, each in found.items())
    assert type(weight) is Rows and weight.device == weight.codes.device
    assert torch.equal(weight.dequantize().cpu(), value)
