"""Edits of parameters that an update follows are found, and the model's thread does not wait for the comparison."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import late
from infinity.engine.training import TrainingEngine
from infinity.tiers.accelerator import StreamTransfer
from late.device import LateAccelerator
from support.configs import engine_config
from support.loops import Result, assert_same, open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(5)
RESIDENT: dict[str, Any] = {"bf16": True, "prefetch_bytes": "1GiB"}
"""Units stay in their buffers, so that updates alone compare them."""


class Edited(Stack):
    """Halves some of a block's weights after its forward, in every other forward, in a way that has no version."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.blocks[2].register_forward_hook(self.edit)

    def edit(self, block: torch.nn.Module, *_: Any) -> None:
        self.calls += 1
        if self.calls % 2:
            next(iter(block.parameters())).data.view(-1)[3:50].mul_(0.5)


def on_device(engine: TrainingEngine, device: LateAccelerator) -> Result:
    losses = train(engine, [tuple(tensor.to(device.torch_device) for tensor in batch) for batch in BATCHES])
    return Result(losses, {name: value.cpu() for name, value in parameters_of(engine).items()})


@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
@pytest.mark.parametrize("param, optim, master", [
    ("cpu", "cpu", "remainder"), ("cpu", "nvme", "fp32"), ("nvme", "cpu", "remainder"), ("none", "cpu", "fp32"),
])  # fmt: skip
def test_an_edit_before_an_update_is_found(lazy: None, param: str, optim: str, master: str, update: str) -> None:
    options = {**RESIDENT, "update": update, "master": master}
    with open_engine(seeded(Edited), engine_config(**options)) as engine:
        expected = Result(train(engine, BATCHES), parameters_of(engine))
    device = LateAccelerator()
    with open_engine(seeded(Edited), engine_config(param, optim, **options), device) as engine:
        assert_same(on_device(engine, device), expected)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
@pytest.mark.parametrize("param, optim", [("cpu", "cpu"), ("nvme", "nvme"), ("none", "cpu")])
def test_an_edit_before_an_eviction_is_found(lazy: None, param: str, optim: str, update: str, bf16: bool) -> None:
    """It is compared after the unit has left its buffer."""
    options = {"bf16": bf16, "prefetch_bytes": 20_000, "update": update}
    with open_engine(seeded(Edited), engine_config(**options)) as engine:
        expected = Result(train(engine, BATCHES), parameters_of(engine))
    device = LateAccelerator()
    with open_engine(seeded(Edited), engine_config(param, optim, **options), device) as engine:
        assert_same(on_device(engine, device), expected)


@pytest.mark.parametrize("param, optim", [("nvme", "cpu"), ("none", "cpu")])
def test_an_update_during_backward_does_not_make_the_model_wait(
    lazy: None, monkeypatch: pytest.MonkeyPatch, param: str, optim: str
) -> None:
    waiting: list[str] = []
    wait = StreamTransfer.wait

    def noted(transfer: StreamTransfer) -> None:
        waiting.append(threading.current_thread().name)
        wait(transfer)

    device = LateAccelerator()
    config = engine_config(param, optim, debug=False, update="during_backward", **RESIDENT)
    with open_engine(seeded(Stack), config, device) as engine:
        batches = [tuple(tensor.to(device.torch_device) for tensor in batch) for batch in BATCHES]
        train(engine, batches)
        loss = engine(*batches[0])
        monkeypatch.setattr(StreamTransfer, "wait", noted)
        read = late.at_once().get("aten::_local_scalar_dense", 0)
        began: list[int] = []
        ended: list[int] = []
        loss.register_hook(lambda gradient: began.append(len(waiting)))
        next(iter(engine.module.parameters())).register_hook(lambda gradient: ended.append(len(waiting)))
        engine.backward(loss)
        assert len(engine._step.updated) > 1
        during = waiting[began[0] : ended[0]]
        assert all(name.startswith("infinity-") for name in during), during
        assert late.at_once().get("aten::_local_scalar_dense", 0) == read
        engine.step()
