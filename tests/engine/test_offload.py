"""`engine.offload_states` frees the device's memory, and `reload_states` restores it with the same bits."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.errors import UsageError
from infinity.tiers.device import CpuDevice
from infinity.tiers.memory import before_unmapping, host_tensor
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import Result, assert_same, open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(6)


class FreeingDevice(LateDevice):
    """A late device whose memory is freed when nothing refers to it. `alive`: address → bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}

        self.most = 0
        """Most bytes that were alive at once since this was set to 0."""

    def empty(self, nbytes: int) -> torch.Tensor:
        memory = host_tensor(nbytes)
        address = memory.data_ptr()
        self.alive[address] = nbytes
        before_unmapping(memory, partial(self.alive.pop, address))
        self.most = max(self.most, sum(self.alive.values()))
        return memory

    def is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() not in self.alive

    def settled(self, most: int) -> int:
        """Return the bytes that are alive, once they are at most `most`: a thread may drop its last reference after its
        work is done.
        """
        deadline = time.monotonic() + 10
        while sum(self.alive.values()) > most and time.monotonic() < deadline:
            time.sleep(0.01)
        return sum(self.alive.values())


PLACES = pytest.mark.parametrize(
    ("param", "optim"), [("none", "none"), ("none", "cpu"), ("cpu", "none"), ("nvme", "nvme")]
)


@pytest.mark.parametrize("late", [True, False], ids=["late device", "cpu"])
@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
@PLACES
def test_training_continues_with_the_same_bits(param: str, optim: str, update: str, late: bool, tmp_path: Path) -> None:
    config = engine_config(param, optim, folder=tmp_path, bf16=True, update=update)

    def run(*, offloads: bool) -> Result:
        with open_engine(seeded(Stack), config, FreeingDevice() if late else CpuDevice()) as engine:
            losses = []
            for batch in BATCHES:
                losses += train(engine, [batch])
                if offloads:
                    engine.offload_states()
                    engine.offload_states()
                    engine.reload_states()
                    engine.reload_states()
            return Result(losses, parameters_of(engine))

    assert_same(run(offloads=True), run(offloads=False))


@pytest.mark.parametrize(("param", "optim"), [("none", "none"), ("nvme", "none")])
def test_device_memory_is_freed_and_allocated_again(param: str, optim: str, tmp_path: Path) -> None:
    device = FreeingDevice()
    with open_engine(seeded(Stack), engine_config(param, optim, folder=tmp_path), device) as engine:
        train(engine, BATCHES[:2])
        reserved = engine.parts.plan.nbytes()["device"]
        assert sum(device.alive.values()) > reserved > 100_000  # and gradients of the first step
        engine.offload_states()
        assert device.settled(0) == 0
        device.most = 0
        engine.reload_states()
        assert sum(device.alive.values()) == device.most == reserved  # no second copy, not even for a moment


@pytest.mark.parametrize("late", [True, False], ids=["late device", "cpu"])
def test_uses_meanwhile_are_refused(late: bool, tmp_path: Path) -> None:
    """A use of the model, of a parameter or of the optimizer's step raises an error, and changes nothing."""
    config = engine_config("none", "none", folder=tmp_path)
    with open_engine(seeded(Stack), config, LateDevice() if late else CpuDevice()) as engine:
        model: Any = engine.module
        train(engine, BATCHES[:2])
        expected = parameters_of(engine)
        engine.offload_states()
        for use in (lambda: engine(*BATCHES[2]), lambda: model.head.weight.sum(), lambda: model.head.weight.tolist()):
            with pytest.raises(UsageError, match=r"call engine\.reload_states\(\) before"):
                use()
        engine.reload_states()
        assert all(torch.equal(value, expected[name]) for name, value in parameters_of(engine).items())
        train(engine, BATCHES[2:])


def test_checkpoints_and_states_meanwhile(tmp_path: Path) -> None:
    """A checkpoint and the states can be read while they are in host memory."""
    config = engine_config("none", "none", folder=tmp_path, bf16=True)
    with open_engine(seeded(Stack), config, LateDevice()) as engine:
        train(engine, BATCHES[:2])
        expected = engine.state_dict()
        engine.offload_states()
        engine.save_checkpoint(tmp_path / "saved")
        assert all(torch.equal(value, expected[name]) for name, value in engine.state_dict().items())
        engine.reload_states()
        losses = train(engine, BATCHES[2:])
    with open_engine(seeded(Stack), config, LateDevice()) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert train(engine, BATCHES[2:]) == losses


@pytest.mark.parametrize("late", [True, False], ids=["late device", "cpu"])
def test_close_returns_the_values(late: bool, tmp_path: Path) -> None:
    config = engine_config("none", "none", folder=tmp_path)
    engine = open_engine(seeded(Stack), config, LateDevice() if late else CpuDevice())
    train(engine, BATCHES[:2])
    expected = engine.state_dict()
    engine.offload_states()
    engine.close(restore=True)
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter.detach(), expected[name])


def test_between_backward_and_step(tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, update="next_forward")
    with open_engine(seeded(Stack), config) as engine:
        engine.backward(engine(*BATCHES[0]))
        with pytest.raises(UsageError, match=r"after engine\.step\(\)"):
            engine.offload_states()
        engine.step()
        engine.offload_states()
