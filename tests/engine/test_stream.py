"""`infinity.stream_weights`: the values of a state_dict, one tensor at a time, from any tier, between steps."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.training import TrainingEngine
from infinity.errors import ModelError, UsageError
from infinity.plan.pools import UNITS
from infinity.tiers.device import CpuDevice
from support.configs import DEVICES, engine_config
from support.late_device import LateDevice
from support.loops import open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches
from support.quantised import adapted

BATCHES = token_batches(4)


class Buffered(Stack):
    """A stack with buffers: one persistent under two names, and one that is not."""

    def __init__(self) -> None:
        super().__init__(depth=3, tied=True)
        self.register_buffer("scale", torch.full((3,), 0.1))
        self.blocks[0].register_buffer("same", self.scale)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def engine_of(device: Any = None, model: Any = Buffered, **options: Any) -> TrainingEngine:
    return open_engine(seeded(model), engine_config(**{"unit_size": 2048, "prefetch_bytes": 0, **options}), device)


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_plain_model_loads_the_present_weights(
    bf16: bool, update: str, device: str, stage: int, late: bool, tmp_path: Path
) -> None:
    """A plain model has the engine's logits, and training continues as without the stream."""
    if device != "none" and stage < 3:
        device = "none"
    options = {"param": device, "bf16": bf16, "update": update, "stage": stage, "folder": tmp_path}
    seam = LateDevice() if late else None
    with engine_of(seam, **options) as engine, engine_of(seam, **options) as other:
        plain = Buffered().to(torch.bfloat16 if bf16 else torch.float32)
        plain.scale, plain.blocks[0].same = plain.scale.float(), plain.blocks[0].same.float()
        for batch in BATCHES:
            assert train(engine, [batch]) == train(other, [batch])
            if late:
                values = {name: value.cpu() for name, value in infinity.stream_weights(engine)}
            else:
                values = dict(infinity.stream_weights(engine))
            assert values.keys() == plain.state_dict().keys()
            plain.load_state_dict(values)
            expected = parameters_of(engine)
            assert all(torch.equal(plain.state_dict()[name], value.cpu()) for name, value in expected.items())
        assert values["head.weight"] is values["embedding.weight"]
        if not late:
            with torch.no_grad():
                assert torch.equal(plain(*BATCHES[0]), engine(*BATCHES[0]))


@pytest.mark.parametrize("device", DEVICES)
def test_an_engine_for_inference_streams(device: str, tmp_path: Path) -> None:
    model, plain = seeded(Buffered), seeded(Buffered)
    config = engine_config(param=device, folder=tmp_path, unit_size=2048)
    with infinity.init_inference(model, config, device=CpuDevice()) as engine:
        for _ in range(2):
            values = dict(infinity.stream_weights(engine))
            assert all(torch.equal(values[name], value) for name, value in plain.state_dict().items())
            with torch.no_grad():
                engine(*BATCHES[0])


def test_names_select_tensors_and_fetch_no_other_unit() -> None:
    with engine_of() as engine:
        before = engine.parts.store.fetches
        wanted = ["blocks.1.up.bias", "head.weight", "scale"]
        values = dict(infinity.stream_weights(engine.module, wanted))
        assert sorted(values) == sorted(wanted)
        assert engine.parts.store.fetches - before == 2
        assert dict(infinity.stream_weights(engine, [])) == {}
        with pytest.raises(UsageError, match=r"named head\.wait, scratch"):
            next(infinity.stream_weights(engine, [*wanted, "head.wait", "scratch"]))
        with pytest.raises(UsageError, match="pass a list"):
            next(infinity.stream_weights(engine, "scale"))


def test_dtype_casts_parameters_and_no_buffer() -> None:
    with engine_of() as engine:
        values = dict(infinity.stream_weights(engine, dtype=torch.float16))
        expected = parameters_of(engine)
        assert all(torch.equal(values[name], value.to(torch.float16)) for name, value in expected.items())
        assert values["scale"].dtype == torch.float32
        wrong: Any = "bf16"
        with pytest.raises(UsageError, match=r"pass a dtype of torch"):
            next(infinity.stream_weights(engine, dtype=wrong))


def test_a_tensor_is_the_callers_own() -> None:
    """Tensors that are kept or edited change neither the engine nor each other, and the engine keeps none."""
    with engine_of(update="next_forward") as engine, engine_of(update="next_forward") as other:
        for each in (engine, other):
            train(each, BATCHES[:2])
        kept = {name: (value, value.clone()) for name, value in infinity.stream_weights(engine)}
        assert train(engine, BATCHES[2:]) == train(other, BATCHES[2:])
        assert all(torch.equal(value, copy) for value, copy in kept.values())
        for _, value in infinity.stream_weights(engine):
            value.zero_()
        assert train(engine, BATCHES) == train(other, BATCHES)
        stream = infinity.stream_weights(engine)
        _, value = next(stream)
        reference = weakref.ref(value)
        del value
        next(stream)
        assert reference() is not None  # the next name of the shared weight
        next(stream)
        gc.collect()
        assert reference() is None


def test_beside_buffers_there_is_one_tensor_at_a_time() -> None:
    """Each tensor is gone before the next is made, and the pool of units does not grow."""
    alive: list[weakref.ref[torch.Tensor]] = []
    with engine_of(model=lambda: Stack(depth=6)) as engine:
        train(engine, BATCHES[:1])
        buffers = engine.parts.pools[UNITS].nbytes
        for _, value in infinity.stream_weights(engine):
            assert value.untyped_storage().nbytes() == value.nbytes  # no view of a unit
            alive.append(weakref.ref(value))
            del value
            assert sum(each() is not None for each in alive) <= 1
            assert engine.parts.pools[UNITS].nbytes == buffers
        assert len(alive) == 38


def test_a_stream_stands_between_steps() -> None:
    with engine_of(update="next_forward") as engine:
        loss = engine(*BATCHES[0])
        engine.backward(loss)
        with pytest.raises(UsageError, match="a stream of weights holds no gradients"):
            next(infinity.stream_weights(engine))
        engine.step()
        assert dict(infinity.stream_weights(engine))


@pytest.mark.parametrize("call", ["forward", "step", "settle", "stream", "close"])
def test_a_call_of_the_engine_ends_the_stream(call: str) -> None:
    """Values from before and after a step are never mixed."""
    with engine_of() as engine:
        stream = infinity.stream_weights(engine)
        for _ in range(3):
            next(stream)
        if call == "forward":
            engine(*BATCHES[0])
        elif call == "step":
            train(engine, BATCHES[:1])
        elif call == "settle":
            engine.settle()
        elif call == "stream":
            assert dict(infinity.stream_weights(engine))
        else:
            engine.close()
        with pytest.raises(UsageError, match=r"the engine was used while stream_weights\(\) was open"):
            next(stream)
        if call != "close":
            assert dict(infinity.stream_weights(engine))


def test_a_caller_may_stop_or_raise_at_any_tensor() -> None:
    with engine_of() as engine, engine_of() as other:
        for stop in range(4):
            for number, _ in enumerate(infinity.stream_weights(engine)):
                if number == stop:
                    break
            with pytest.raises(ValueError, match="no room"):
                for _ in infinity.stream_weights(engine):
                    raise ValueError("no room")
            assert train(engine, BATCHES[stop : stop + 1]) == train(other, BATCHES[stop : stop + 1])


def test_tiles_arrive_as_one_tensor() -> None:
    plain = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 64)))
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 64)))
    infinity.nn.tile(model, 1024)
    with open_engine(model, engine_config(unit_size=512)) as engine:
        values = dict(infinity.stream_weights(engine))
        assert values.keys() == plain.state_dict().keys()
        assert all(torch.equal(values[name], value) for name, value in plain.state_dict().items())


class Packed(nn.Linear):
    """Shows another tensor in its state_dict, as quantised layers do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.ones(1)


def test_a_quantised_layer_is_refused_unless_it_is_left_out() -> None:
    with engine_of(model=lambda: nn.Sequential(nn.Linear(4, 4), Packed(4, 4))) as engine:
        with pytest.raises(ModelError, match="1 is a Packed"):
            next(infinity.stream_weights(engine))
        assert set(dict(infinity.stream_weights(engine, ["0.weight"]))) == {"0.weight"}


def test_a_tensor_subclass_is_refused_unless_it_is_left_out() -> None:
    """Units hold its inner tensors, and an inference engine needs values."""
    with open_engine(adapted(), engine_config()) as engine:
        for name in (None, ["layers.1.base.weight"]):
            with pytest.raises(ModelError, match=r"layers\.\d\.base\.weight is a Rows, .*leave it out by names="):
                next(infinity.stream_weights(engine, name))
        wanted = [name for name, _ in engine.module.named_parameters() if ".base.weight" not in name]
        assert set(dict(infinity.stream_weights(engine, wanted))) == set(wanted)


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(UsageError, match="Stack, which is neither an open engine nor the model of one"):
        next(infinity.stream_weights(Stack(depth=1)))
