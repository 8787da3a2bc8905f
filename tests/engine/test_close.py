"""Models after their engine was closed: usable if the parameters fit in memory; otherwise any use raises an error."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import infinity
from engine.test_offload import FreeingDevice
from infinity.engine import restore
from infinity.engine.parts import close_memory
from infinity.engine.restore import LOCKS
from infinity.errors import ModelError, OutOfMemoryError, UsageError
from infinity.tiers import memory
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(3)


def test_a_backward_after_closing_has_its_gradients() -> None:
    """The graph of a forward before still refers to the units, which backward fetches into the engine's buffers."""
    plain = seeded(Stack)
    plain(*BATCHES[0]).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    engine = open_engine(seeded(Stack), engine_config("cpu", "cpu", prefetch_bytes=20_000))
    loss = engine(*BATCHES[0])
    engine.close()
    loss.backward()
    found = {name: parameter.grad for name, parameter in engine.module.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


@pytest.mark.parametrize("number", range(len(LOCKS)))
def test_an_engine_is_collected_while_a_thread_starts(number: int) -> None:
    """The collector then runs under a lock of Python that the engine's threads take when they end."""
    threads = set(threading.enumerate())
    box = [open_engine(seeded(Stack), engine_config("nvme", "nvme"))]
    train(box[0], BATCHES)
    own = [thread for thread in threading.enumerate() if thread not in threads]
    closed = weakref.ref(box[0])
    with LOCKS[number]:
        box.clear()
        gc.collect()
        assert closed() is None
    for thread in own:
        thread.join(20)
    assert own and not any(thread.is_alive() for thread in own)


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("param", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("asked", [False, True], ids=["close", "restore"])
def test_values_after_close(param: str, asked: bool, late: bool, tmp_path: Path) -> None:
    model = seeded(Stack)
    kept = model.head.weight
    engine = open_engine(model, engine_config(param, "nvme", folder=tmp_path), LateDevice() if late else None)
    train(engine, BATCHES)
    values, expected = parameters_of(engine), engine(*BATCHES[0]).item()
    engine.close(restore=asked)
    if param == "nvme" and not asked:
        for use in (lambda: model(*BATCHES[0]), lambda: kept + 1, lambda: model.state_dict()):
            with pytest.raises(UsageError, match=r"engine is closed.*restore=True"):
                use()
        with pytest.raises(ModelError, match="closed"):
            open_engine(model, engine_config(folder=tmp_path))
        assert kept.shape == (61, 32)
        engine.close()
        with pytest.raises(UsageError, match=r"closed already.*values are gone"):
            engine.close(restore=True)
        return
    engine.close(restore=True)
    assert model.head.weight is kept and type(kept) is torch.nn.Parameter
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name]), name
    assert model(*BATCHES[0]).item() == expected
    model(*BATCHES[0]).backward()
    assert kept.grad is not None
    model.zero_grad()
    with open_engine(model, engine_config(folder=tmp_path)) as again:  # another engine can take it
        assert again(*BATCHES[0]).item() == expected


def test_restoring_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(restore, "available_memory", lambda: 1000)
    engine = open_engine(seeded(Stack), engine_config(folder=tmp_path))
    with pytest.raises(OutOfMemoryError, match=r"parameters of the closed engine: [0-9,]+ bytes are needed, 1,000"):
        engine.close(restore=True)
    engine = open_engine(seeded(Stack), engine_config("cpu", "cpu"))
    engine.close()  # restore was not requested, so no error
    with pytest.raises(UsageError, match="engine is closed"):
        engine.module(*BATCHES[0])


def test_closing_in_another_thread_frees_everything(tmp_path: Path) -> None:
    engine = open_engine(seeded(Stack), engine_config(folder=tmp_path))
    train(engine, BATCHES)
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("infinity")]
    x = torch.ones(3, requires_grad=True)
    assert torch.func.grad(lambda x: x.square().sum())(x).sum() == 6


def test_an_error_of_a_lost_device_leaves_nothing_open() -> None:
    ended: list[str] = []

    def end(name: str) -> None:
        ended.append(name)
        raise RuntimeError(f"{name}: device lost")

    device = SimpleNamespace(finish=lambda: end("copies"), lift_limit=lambda: ended.append("limit"))
    tiers = [SimpleNamespace(close=partial(end, name)) for name in ("cpu", "nvme")]
    activations = SimpleNamespace(close=partial(end, "activations"))
    with pytest.raises(RuntimeError, match="copies: device lost"):
        close_memory(device, tiers, activations)  # type: ignore[arg-type]
    assert ended == ["activations", "nvme", "cpu", "copies", "limit"]


def test_a_model_that_only_ran_has_its_values_back() -> None:
    model = seeded(Stack)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    infinity.init_inference(model, {"zero_optimization": {"stage": 0}}).close()
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


def test_a_model_is_changed_between_two_engines(tmp_path: Path) -> None:
    """A layer replaced under an engine is rejected; after close(restore=True), the changed model trains on."""
    engine = open_engine(seeded(Stack), engine_config("nvme", "nvme", folder=tmp_path))
    train(engine, BATCHES)
    values = parameters_of(engine)
    model = engine.module
    model.head = torch.nn.Linear(32, 61)
    with pytest.raises(UsageError, match=r"parameter head\.weight.*engine\.close\(restore=True\)"):
        engine(*BATCHES[0])
    engine.close(restore=True)
    with open_engine(model, engine_config("nvme", "nvme", folder=tmp_path)) as again:
        kept = parameters_of(again)
        assert all(torch.equal(kept[name], values[name]) for name in values if not name.startswith("head."))
        train(again, BATCHES)


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("activations", [None, "cpu"])
@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_memory_is_free_at_once(tier: str, activations: str | None, late: bool, tmp_path: Path) -> None:
    """A script that keeps the closed engine keeps none of its memory, except a few flags."""
    gc.collect()
    before = list(memory._alive)
    moved = {"activations": {"device": activations, "min_bytes": 1024}} if activations else {}
    config = engine_config(tier, tier, folder=tmp_path, bf16=True, clip=0.5, **moved)
    device = FreeingDevice() if late else CpuDevice()
    engine = open_engine(seeded(Stack), config, device)
    train(engine, token_batches(2))
    assert max(len(mapping) for mapping in memory._alive if mapping not in before) > 8192
    gc.disable()
    try:
        engine.close()
        assert not isinstance(device, FreeingDevice) or device.settled(0) == 0
        left = [len(mapping) for mapping in memory._alive if mapping not in before]
        assert not left or max(left) <= 64
    finally:
        gc.enable()


def test_a_state_dict_that_is_read_after_closing_is_refused() -> None:
    engine = open_engine(seeded(Stack), engine_config("cpu", "cpu"))
    values = engine.stream_state_dict()
    next(values)
    engine.close()
    with pytest.raises(UsageError, match="closed"):
        list(values)
