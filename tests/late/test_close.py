"""Device of a closed engine's parameters when device memory is short."""

from __future__ import annotations

import logging

import pytest
import torch

import late
from late.device import LateAccelerator
from late.test_engine import on_device
from support.configs import engine_config
from support.loops import open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches


@pytest.mark.parametrize("param", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("room", ["all", "some", "none"])
def test_parameters_that_the_device_cannot_hold_are_in_host_memory(
    order: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, param: str, room: str
) -> None:
    """some: an allocation fails after some parameters were copied, as under infinity.memory.device."""
    device = LateAccelerator()
    model, batches = seeded(lambda: Stack(depth=30)), token_batches(2)
    engine = open_engine(model, engine_config(param, "cpu", prefetch_bytes=20_000), device)
    train(engine, on_device(batches, device.torch_device))
    values = {name: value.cpu() for name, value in parameters_of(engine).items()}
    if room == "none":
        monkeypatch.setattr(device, "available_bytes", lambda: 1000)
    if room == "some":
        late.set_limit(0, torch.accelerator.memory_allocated() + 400_000)
    try:
        with caplog.at_level(logging.WARNING, "infinity"):
            engine.close(restore=True)
    finally:
        late.set_limit(0, None)
    assert {parameter.device.type for parameter in model.parameters()} == {"late" if room == "all" else "cpu"}
    assert ("they are in host memory" in caplog.text) == (room != "all")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.cpu(), values[name]), name
    if room != "all":  # the model trains on, on the CPU
        model(*batches[0]).backward()
