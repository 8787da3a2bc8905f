"""Frozen parameters that are tensor subclasses of inner tensors: stored by these, and the same object to the model."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.inference import InferenceEngine
from infinity.errors import CheckpointError, ModelError, UsageError
from infinity.tiers.device import CpuDevice
from infinity.units.released import is_released
from support.configs import engine_config
from support.late_device import LateDevice
from support.lifetime import Residents, assert_nothing_leaked, pool_buffers
from support.loops import Result, assert_close, assert_same, open_engine, parameters_of, plain, train, trained
from support.models import Linears, seeded, vector_batches
from support.quantised import Adapted, Recomputed, Rows, adapted, dequantised, rows, rows_twice

BATCHES = vector_batches(4)
PLACES = [
    *((3, param, optim) for param in ("none", "cpu", "nvme") for optim in ("none", "cpu", "nvme")),
    *((stage, "none", optim) for stage in (0, 1, 2) for optim in ("none", "cpu", "nvme")),
]
FEW = [(3, "nvme", "nvme"), (3, "cpu", "none"), (2, "none", "cpu"), (0, "none", "none")]


def adapters(result: Result) -> Result:
    """Return the parameters that every form of the model has."""
    return Result(result.losses, {name: v for name, v in result.parameters.items() if ".base.weight" not in name})


def weight_of(model: nn.Module, layer: int = 1) -> Any:
    return model.layers[layer].base.weight  # type: ignore[index,union-attr]


@pytest.mark.parametrize("quantise", [rows, rows_twice])
@pytest.mark.parametrize("kind", [Adapted, Recomputed])
@pytest.mark.parametrize(
    "stage, param, optim",
    [place if place in FEW else pytest.param(*place, marks=pytest.mark.campaign) for place in PLACES],
)
def test_trains_like_dequantised_weights(
    stage: int, param: str, optim: str, kind: type[Adapted], quantise: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Losses and adapters have the bits of ordinary weights on the same tier, and those of a plain loop within AdamW's
    rounding. Fewer units are resident than there are, and nothing keeps a buffer.
    """
    config = engine_config(param, optim, stage=stage, prefetch_bytes=0)
    expected = trained(seeded(partial(dequantised, quantise, kind)), BATCHES, config)
    model = seeded(partial(adapted, quantise, kind))
    before = [weight_of(model, layer) for layer in range(6)]
    values = [weight.dequantize() for weight in before]
    with open_engine(model, config) as engine:
        residents = Residents(engine)
        result = Result(train(engine, BATCHES), parameters_of(engine))
        assert not engine.parts.store.kept.warned
        if param == "nvme":
            assert residents.most <= pool_buffers(engine) < len(engine.units)
        for number, weight in enumerate(before):
            assert weight_of(model, number) is weight and isinstance(weight, (Rows, nn.Parameter))
            assert torch.equal(weight.dequantize(), values[number])
        assert_nothing_leaked(engine)
        engine.close(restore=True)
    assert_same(adapters(result), adapters(expected))
    plainly = plain(seeded(partial(adapted, quantise, kind)), BATCHES, config)
    assert_close(adapters(result), adapters(plainly))
    assert plainly.losses[0] == result.losses[0]
    for weight, value in zip(before, values, strict=True):
        assert type(weight) is Rows and torch.equal(weight.dequantize(), value)


@pytest.mark.parametrize("update", ["during_backward", "next_forward", "after_backward"])
def test_trains_on_a_device_of_its_own_memory(update: str) -> None:
    clip = 0.0 if update == "during_backward" else 0.1
    config = engine_config(update=update, clip=clip, accumulation=2, prefetch_bytes=4096)
    expected = trained(seeded(partial(dequantised, rows_twice)), BATCHES, config)
    result = trained(seeded(partial(adapted, rows_twice)), BATCHES, config, LateDevice())
    assert_same(adapters(result), adapters(expected))


def test_computes_in_bf16_with_the_scales_of_the_class() -> None:
    """Inner tensors keep their dtype, also where it is not the engine's, and a wrapper of another dtype is refused."""
    config = engine_config(bf16=True)
    batches = [tuple(each.bfloat16() for each in batch) for batch in BATCHES]

    def in_bf16(weight: torch.Tensor) -> Rows:
        once = rows_twice(weight)
        scale = Rows(once.scale.codes, once.scale.scale.float())  # type: ignore[attr-defined]
        return Rows(once.codes, scale)

    make = partial(adapted, rows_twice, dtype=torch.bfloat16)
    with open_engine(seeded(make), config) as engine:
        assert {str(unit.layout.dtype) for unit in engine.units} == {"torch.int8", "torch.bfloat16"}
        losses = train(engine, batches)
    assert losses[0] == seeded(make)(*batches[0]).item()
    with pytest.raises(ModelError, match=r"layers\.0\.base\.weight is a Rows that computes in torch\.float32"):
        open_engine(adapted(), config)
    layer = seeded(make)
    weight_of(layer).scale.scale.data = weight_of(layer).scale.scale.float()
    with open_engine(layer, config) as engine:
        assert "layers.1 (inner float32)" in {unit.name for unit in engine.units}
        value = engine.state_dict()["layers.1.base.weight"]
        assert isinstance(value, Rows) and value.scale.scale.dtype == torch.float32  # type: ignore[attr-defined]


@pytest.mark.parametrize("param", ["none", "cpu", "nvme"])
def test_runs_in_inference(param: str) -> None:
    expected = seeded(adapted)(*BATCHES[0])
    engine = infinity.init_inference(seeded(adapted), engine_config(param, prefetch_bytes=0), device=CpuDevice())
    with engine, torch.no_grad():
        assert isinstance(engine, InferenceEngine)
        for _ in range(2):
            assert torch.equal(engine(*BATCHES[0]), expected)
        assert_nothing_leaked(engine)  # type: ignore[arg-type]


def test_code_outside_of_forward_reads_present_values() -> None:
    """A kept wrapper and its inner tensors fetch their units, deep copies are whole, and an edit is kept."""
    model, reference = seeded(partial(adapted, rows_twice)), seeded(partial(adapted, rows_twice))
    with open_engine(model, engine_config(prefetch_bytes=0)) as engine:
        train(engine, BATCHES[:1])
        engine.settle()
        weight, expected = weight_of(model), weight_of(reference)
        assert is_released(weight) and is_released(weight.scale.codes) and weight.shape == expected.shape
        assert torch.equal(weight.codes + 0, expected.codes) and torch.equal(
            weight.scale.scale + 0, expected.scale.scale
        )
        assert torch.equal(copy.deepcopy(weight.codes), expected.codes)
        assert torch.equal(weight @ torch.eye(32), expected.dequantize())
        with infinity.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            weight.codes.neg_()
        assert torch.equal(weight.dequantize(), -expected.dequantize())
        with pytest.raises(UsageError, match=r"param is a ReleasedRows, .*GatheredParameters"):
            infinity.get_full_fp32_param(weight)
        weight.requires_grad_(True)
        with pytest.raises(UsageError, match=r"layers\.1\.base\.weight\.codes was frozen"):
            engine(*BATCHES[0])
        weight.requires_grad_(False)
    with pytest.raises(UsageError, match="engine is closed"):
        weight.dequantize()


def test_a_save_between_forward_and_backward_of_a_transposed_weight() -> None:
    """Autograd saves a wrapper of a view. It comes back from another buffer, after the unit has left the first one."""
    model = seeded(adapted)
    with open_engine(model, engine_config(prefetch_bytes=0)) as engine:
        loss = engine(*BATCHES[0])
        for unit in engine.units[:9]:  # passes other units through the buffers
            engine.parts.runner.use(unit)
        assert all(unit.lease is None for unit in engine.units[-3:])
        engine.backward(loss)
        engine.step()
        again = seeded(adapted)
        again(*BATCHES[0]).backward()
        assert not engine.parts.store.kept.warned
        del loss
        gc.collect()
        assert_nothing_leaked(engine)


@pytest.mark.parametrize("durable", [False, True])
def test_checkpoints_hold_inner_tensors(durable: bool, tmp_path: Path) -> None:
    """A run that was saved goes on with the bits of one that never ended, and a checkpoint without the base needs it
    from the model.
    """
    make = partial(adapted, rows_twice)
    options: dict[str, Any] = {"folder": tmp_path, "durable": durable}
    with open_engine(seeded(make), engine_config(**options)) as engine:
        train(engine, BATCHES[:2])
        engine.save_checkpoint(tmp_path / "whole")
        engine.save_checkpoint(tmp_path / "adapter", exclude_frozen_parameters=True)
        expected = Result(train(engine, BATCHES[2:]), parameters_of(engine))
    for name, seed in (("whole", 1), ("adapter", 0)):
        with open_engine(seeded(make, seed), engine_config(folder=tmp_path)) as engine:
            engine.load_checkpoint(tmp_path / name, load_module_strict=name == "whole")
            assert_same(Result(train(engine, BATCHES[2:]), parameters_of(engine)), expected)
    other = r"layers\.0\.base\.weight\.scale"
    with open_engine(seeded(adapted), engine_config()) as engine, pytest.raises(CheckpointError, match=other):
        engine.load_checkpoint(tmp_path / "whole")


def test_a_checkpoint_of_other_codes_is_refused(tmp_path: Path) -> None:
    def unsigned(weight: torch.Tensor) -> Rows:
        made = rows(weight)
        return Rows((made.codes.int() + 128).to(torch.uint8), made.scale)

    with open_engine(seeded(adapted), engine_config(folder=tmp_path)) as engine:
        engine.save_checkpoint(tmp_path)
    said = r"codes is torch\.uint8 in the model and torch\.int8 in the checkpoint"
    make = partial(adapted, unsigned)
    with open_engine(seeded(make), engine_config()) as engine, pytest.raises(CheckpointError, match=said):
        engine.load_checkpoint(tmp_path)


def test_state_dicts_have_the_names_and_classes_of_the_model(tmp_path: Path) -> None:
    model, reference = seeded(partial(adapted, rows_twice)), seeded(partial(adapted, rows_twice))
    expected = reference.state_dict()
    with open_engine(model, engine_config(prefetch_bytes=0)) as engine:
        for state in (engine.state_dict(), model.state_dict()):
            assert state.keys() == expected.keys()
            for name, value in state.items():
                assert type(value) is type(expected[name])
                assert torch.equal(value + 0, expected[name] + 0)
        engine.save_16bit_model(tmp_path, "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert torch.equal(loaded["layers.0.base.weight"].dequantize(), weight_of(reference, 0).dequantize())
        with pytest.raises(CheckpointError, match=r"layers\.0\.base\.weight is a Rows, .*exclude_frozen_parameters"):
            engine.save_16bit_model(tmp_path, "model.safetensors")
        engine.save_16bit_model(tmp_path, "model.safetensors", exclude_frozen_parameters=True)


def test_optimizer_states_with_groups_of_all_parameters() -> None:
    """A group may list frozen wrappers, as model.parameters() does."""
    model = seeded(adapted)
    engine, optimizer, *_ = infinity.initialize(
        model, engine_config(), model_parameters=model.parameters(), device=CpuDevice()
    )
    with engine:
        train(engine, BATCHES[:1])
        optimizer.load_state_dict(optimizer.state_dict())
        train(engine, BATCHES[1:2])


def test_a_shared_wrapper_belongs_to_one_unit() -> None:
    def shared() -> Linears:
        model = adapted()
        model.layers[4].base.weight = model.layers[1].base.weight  # type: ignore[union-attr]
        return model

    expected = plain(seeded(shared), BATCHES, engine_config())
    with open_engine(seeded(shared), engine_config(prefetch_bytes=0)) as engine:
        result = Result(train(engine, BATCHES), parameters_of(engine))
        state = engine.state_dict()
        assert state["layers.1.base.weight"] is state["layers.4.base.weight"]
    assert_close(adapters(result), adapters(expected))


class Fresh(Rows):
    """Makes its codes anew at each access."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return value.detach() if name == "codes" else value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].codes, args[0].scale)


class Broken(Rows):
    def __tensor_flatten__(self) -> Any:
        raise NotImplementedError("not yet")


REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "transposed codes": (
        lambda w: Rows(torch.zeros(32, 32, dtype=torch.int8).t(), torch.ones(32, 1)),
        r"holds codes with strides \(1, 32\)",
    ),
    "overlapping scale": (
        lambda w: Rows(torch.zeros(32, 32, dtype=torch.int8), torch.ones(1, 1).expand(32, 1)),
        r"holds scale with strides \(0, ",
    ),
    "sparse": (
        lambda w: Rows(torch.zeros(32, 32, dtype=torch.int8), w.to_sparse()),
        "holds scale, a Tensor that is not",
    ),
    "meta": (lambda w: rows(w.to("meta")), "has codes on the meta device: build the model on the cpu"),
    "fresh": (lambda w: Fresh(torch.zeros(32, 32, dtype=torch.int8), torch.ones(32, 1)), "makes codes anew"),
    "broken": (lambda w: Broken(torch.zeros(32, 32, dtype=torch.int8), torch.ones(32, 1)), "cannot be flattened"),
}


@pytest.mark.parametrize("begin", [infinity.initialize, infinity.init_inference])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_stored_is_refused_by_name(case: str, begin: Any) -> None:
    quantise, reason = REFUSED[case]
    text = rf"parameter layers\.0\.base\.weight is a \S*\.(Rows|Fresh|Broken) that {reason}.*nn\.Parameter\("
    with pytest.raises(ModelError, match=text):
        begin(adapted(quantise), engine_config(), device=CpuDevice())


def test_a_trainable_wrapper_is_refused_by_name() -> None:
    model = adapted()
    weight_of(model).requires_grad_(True)
    with pytest.raises(ModelError, match=r"layers\.1\.base\.weight is a \S*Rows that requires a gradient, .*freeze it"):
        infinity.initialize(model, engine_config(), device=CpuDevice())


def test_inner_tensors_that_share_memory_are_refused_by_name() -> None:
    model = adapted()
    weight_of(model, 1).scale.data = weight_of(model, 0).scale.data
    with pytest.raises(
        ModelError, match=r"layers\.0\.base\.weight\.scale and layers\.1\.base\.weight\.scale share mem"
    ):
        open_engine(model, engine_config())
