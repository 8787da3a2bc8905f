"""`infinity.init_inference`: runs a model from any tier, and stores only its parameters."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.engine.inference import InferenceEngine
from infinity.errors import CheckpointError, ConfigError, ModelError, UsageError
from infinity.optim.cpu_adam import split_master
from infinity.plan.placement import State
from infinity.tiers.device import CpuDevice, Device
from support.configs import DEVICES, engine_config
from support.late_device import LateDevice
from support.lifetime import Residents, assert_nothing_leaked, pool_buffers
from support.loops import open_engine, plain, train
from support.models import Linears, Stack, seeded, token_batches, vector_batches

BATCHES = token_batches(4)
DTYPES = pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


def opened(
    model: nn.Module, *, dtype: torch.dtype | None = None, device: Device | None = None, **options: Any
) -> InferenceEngine:
    """An inference engine on the CPU that fetches units on use, with as few buffers as possible."""
    config = engine_config(**{"prefetch_bytes": 0, **options})
    return infinity.init_inference(model, config, dtype=dtype, device=device or CpuDevice())


def cast(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return the model with floating-point parameters in `dtype`; buffers are unchanged."""
    for parameter in model.parameters():
        if dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def results(model: Any, batches: Any = BATCHES) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(*batch) for batch in batches]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


# -- the model's results -----------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("param", DEVICES)
@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
def test_runs_from_any_tier(param: str, late: bool, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Results are bit-identical to the plain model's, with fewer buffers than the model has units."""
    expected = results(cast(seeded(Stack), dtype))
    device = LateDevice() if late else None
    with opened(seeded(Stack), dtype=dtype, device=device, param=param, folder=tmp_path) as engine:
        residents = Residents(engine)
        assert same([x.cpu() for x in results(engine)], expected)
        if late or param == "nvme":
            assert residents.most <= pool_buffers(engine) < len(engine.units)
        else:  # in place
            assert residents.most == len(engine.units) and pool_buffers(engine) == 0
        assert_nothing_leaked(engine)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_that_keep_parameters_resident(stage: int) -> None:
    with opened(seeded(Stack), param="none", optim="none", stage=stage) as engine:
        assert same(results(engine), results(seeded(Stack)))
        assert engine.ledger.snapshot().fetches == 0
    with opened(seeded(Stack), device=LateDevice(), param="none", optim="none", stage=stage) as engine:
        results(engine)
        fetches = engine.ledger.snapshot().fetches
        results(engine)
        assert engine.ledger.snapshot().fetches == fetches == len(engine.units)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_of_autograd(mode: Any) -> None:
    """Autograd modes may change between forwards; buffers created in one mode must work in the others."""
    expected = results(seeded(Stack))
    with opened(seeded(Stack)) as engine:
        with mode():
            one = [engine(*batch) for batch in BATCHES]
        assert same(one, expected)
        assert same(results(engine), expected)
        assert not any(parameter.is_inference() for parameter in engine.module.parameters())
        with mode():
            assert same([engine(*batch) for batch in BATCHES], expected)


def test_training_may_begin_with_inference_mode(tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, prefetch_bytes=0)
    with open_engine(seeded(Stack), config) as engine:
        with torch.inference_mode():
            engine(*BATCHES[0])
        losses = train(engine, BATCHES)
    assert losses == pytest.approx(plain(seeded(Stack), BATCHES, config).losses, rel=1e-6)


def test_gradients_of_inputs() -> None:
    """Weights are frozen, and autograd's references to them are fetched from their tier."""
    ((x, targets),) = vector_batches(1)

    def gradient(model: Any) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        model(leaf, targets).backward()
        assert leaf.grad is not None
        return leaf.grad

    expected = gradient(seeded(Linears))
    with opened(seeded(Linears), unit_size=1000) as engine:
        residents = Residents(engine)
        for _ in range(3):
            assert torch.equal(gradient(engine), expected)
        assert residents.most < len(engine.units)
        assert all(parameter.grad is None for parameter in engine.module.parameters())
        with pytest.raises(ZeroDivisionError):
            leaf = x.clone().requires_grad_()
            leaf.register_hook(lambda grad: 1 // 0)
            engine(leaf, targets).backward()
        assert torch.equal(gradient(engine), expected)
        assert_nothing_leaked(engine)


def test_dropout_is_off() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    with opened(model) as engine:
        x = torch.ones(3, 4)
        assert torch.equal(engine(x), engine(x))
        assert engine.train().module.training


class Quantised(nn.Module):
    """A linear layer of int8 weights, scaled by row; the shift is a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-127, 128, (width, width), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(width) / 127)
        self.register_buffer("shift", torch.randint(-3, 4, (width,), dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.weight.to(self.scale.dtype) + self.shift) * self.scale[:, None]
        return F.linear(x, weight)


@DTYPES
def test_integers_stay_integers(dtype: torch.dtype | None) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.ModuleList(Quantised(64) for _ in range(4))))

    expected = cast(seeded(make), dtype)
    x = torch.randn(3, 64).to(dtype or torch.float32)
    with opened(seeded(make), dtype=dtype, unit_size=8000) as engine:
        assert {unit.layout.dtype for unit in engine.units} == {torch.int8, dtype or torch.float32}
        assert same(results(engine, [(x,)]), results(expected, [(x,)]))
        assert engine.state_dict()["0.shift"].dtype == torch.int8


def test_what_was_trained_shares_units_with_what_was_frozen() -> None:
    model = seeded(Stack)
    for block in model.blocks:
        block.get_submodule("up").requires_grad_(False)
    with opened(model) as engine, opened(seeded(Stack)) as other:
        assert [unit.name for unit in engine.units] == [unit.name for unit in other.units]
        assert not any(parameter.requires_grad for parameter in engine.module.parameters())


# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("param", DEVICES)
def test_nothing_is_kept_but_parameters(param: str, tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with opened(seeded(Stack), param=param, folder=tmp_path, dtype=torch.bfloat16) as engine:
        assert [pool.name for pool in engine.parts.pools] == ["units"]
        assert set(engine.parts.tiers) == {{"none": "device", "cpu": "host", "nvme": "nvme"}[param]}
        held = engine.ledger.tier_bytes()
        assert sum(held.values()) <= sum(-(-u.layout.nbytes // 65536) * 65536 for u in engine.units) + sum(
            pool.nbytes for pool in engine.parts.pools
        )
        assert not any(
            engine.parts.plan.placement.holds(u.index, s) for u in engine.units for s in (State.GRAD, State.OPTIM)
        )
        results(engine)
        after = {thread.name for thread in threading.enumerate()} - before
        assert not any(name.startswith(("infinity-update", "infinity-grads")) for name in after)
        assert "for inference" in engine.describe()


def test_cached_units_are_not_read_again(tmp_path: Path) -> None:
    """Every pass reads each unit at most once, and never the fixed subset in the cache."""
    block, fetches = 40_960, {}  # bytes, in whole slots

    def make() -> Stack:
        return Stack(depth=20)

    for cached in (0, 8):
        config = {"prefetch_bytes": block, "cache_bytes": cached * block}
        with opened(seeded(make), folder=tmp_path, **config) as engine:
            assert max(unit.layout.nbytes for unit in engine.units) == block
            results(engine, BATCHES[:2])
            before = engine.ledger.snapshot()
            assert same(results(engine), results(seeded(make)))
            moved = engine.ledger.snapshot() - before
            fetches[cached] = moved.fetches / len(BATCHES)
            assert fetches[cached] <= len(engine.units)
            assert moved.nvme_bytes_read / len(BATCHES) <= sum(u.layout.nbytes for u in engine.units)
    assert fetches[0] - fetches[8] >= 7.5


def test_a_model_on_the_meta_device(tmp_path: Path) -> None:
    """The model gets the same initial values as in training."""
    with torch.device("meta"):
        one, other = Stack(), Stack()
    torch.manual_seed(4)
    with open_engine(one, engine_config(folder=tmp_path)) as trained:
        expected = trained.state_dict()
    torch.manual_seed(4)
    with opened(other) as engine:
        found = engine.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("config", [None, {}, {"train_batch_size": 7, "bf16": {"enabled": True}}], ids=str)
def test_configs(config: Any) -> None:
    with infinity.init_inference(seeded(Stack), config, device=CpuDevice()) as engine:
        assert same(results(engine), results(cast(seeded(Stack), torch.bfloat16 if config else None)))


def test_dtype_comes_before_the_configs() -> None:
    with opened(seeded(Stack).to(torch.float16), dtype=torch.float32, bf16=True) as engine:
        assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float32}


# -- parameters from outside -------------------------------------------------------------------------------------------


def test_parameters_can_be_read_and_edited() -> None:
    with opened(seeded(Stack), dtype=torch.bfloat16) as engine:
        stack: Any = engine.module
        weight = stack.blocks[0].up.weight
        infinity.set_full_fp32_param(weight, torch.full_like(weight, 0.5, dtype=torch.float32))
        with infinity.GatheredParameters(stack.head.parameters(), modifier_rank=0):
            stack.head.weight.data.zero_()
        stack.blocks[1].up.bias.data.fill_(3)
        results(engine)  # evicts them
        state = engine.state_dict()
        assert (state["blocks.0.up.weight"] == 0.5).all() and (state["head.weight"] == 0).all()
        assert (state["blocks.1.up.bias"] == 3).all()
        assert (infinity.get_full_fp32_param(stack.blocks[1].up.bias) == 3).all()
        assert infinity.get_full_grad(weight) is None
        with pytest.raises(UsageError, match="has no gradient"):
            infinity.set_full_grad(weight, torch.zeros(weight.shape))
        with pytest.raises(UsageError, match="the parameter is frozen"):
            infinity.get_full_optimizer_state(weight, "exp_avg")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("param", DEVICES)
def test_loads_a_checkpoint_of_training(precision: str, param: str, tmp_path: Path) -> None:
    """Parameters are bit-identical to those of training, since masters are rounded alike."""
    options: dict[str, Any] = {"bf16": {"bf16": True}, "fp16": {"fp16": {"loss_scale": 8}}, "fp32": {}}[precision]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[precision]

    def make() -> Stack:
        model = Stack()
        model.blocks[2].requires_grad_(False)
        model.register_buffer("seen", torch.tensor(0))
        return model

    model = seeded(make)
    with open_engine(model, engine_config(folder=tmp_path, unit_size=30_000, **options)) as engine:
        train(engine, BATCHES[:2])
        model.seen.fill_(7)  # type: ignore[operator]
        engine.save_checkpoint(tmp_path / "saved", client_state={"epoch": 2})
        expected, values = engine.state_dict(), results(engine)
    with opened(seeded(make, 1), param=param, folder=tmp_path, dtype=dtype) as runner:
        results(runner)  # units are in buffers that the load must not leave as they are
        path, client_state = runner.load_checkpoint(tmp_path / "saved")
        assert (path.name, client_state) == ("global_step2", {"epoch": 2})
        found = runner.state_dict()
        assert same(results(runner), values)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_checkpoint_in_another_dtype(tmp_path: Path) -> None:
    with open_engine(seeded(Stack), engine_config(folder=tmp_path)) as engine:
        train(engine, BATCHES[:1])
        engine.save_checkpoint(tmp_path / "saved")
        expected = {name: split_master(value)[0] for name, value in engine.state_dict().items()}
    with opened(seeded(Stack, 1), dtype=torch.bfloat16) as runner:
        runner.load_checkpoint(tmp_path / "saved")
        found = runner.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    with open_engine(seeded(lambda: Stack(depth=3)), engine_config(folder=tmp_path)) as engine:
        engine.save_checkpoint(tmp_path / "saved")
    with opened(seeded(Stack)) as runner:
        with pytest.raises(CheckpointError, match="of another model: blocks"):
            runner.load_checkpoint(tmp_path / "saved")
        assert same(results(runner), results(seeded(Stack)))


def test_its_own_checkpoint_is_loaded_by_engines_of_both_kinds(tmp_path: Path) -> None:
    """It holds parameters and buffers, and the steps of the run whose checkpoint was loaded before."""
    config = engine_config(folder=tmp_path)
    with open_engine(seeded(Stack), config) as engine:
        for batch in BATCHES:
            engine.backward(engine(*batch))
            engine.step()
        expected = engine.state_dict()
        engine.save_checkpoint(tmp_path / "trained")
        steps = engine.global_steps
    with opened(seeded(Stack, seed=1)) as runner:
        runner.load_checkpoint(tmp_path / "trained")
        folder = runner.save_checkpoint(tmp_path / "saved", client_state={"epoch": 3})
        assert folder.name == f"global_step{steps}"
    with opened(seeded(Stack, seed=2)) as runner:
        assert runner.load_checkpoint(tmp_path / "saved")[1] == {"epoch": 3}
        assert runner.global_steps == steps
        found = runner.state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    with open_engine(seeded(Stack, seed=3), config) as engine:
        with pytest.raises(CheckpointError, match="trained in the model and not so in the checkpoint"):
            engine.load_checkpoint(tmp_path / "saved")
        engine.load_checkpoint(tmp_path / "saved", load_module_only=True)
        found = engine.state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_checkpoint_that_lacks_parameters_leaves_them(tmp_path: Path) -> None:
    """strict=False loads the rest of a unit; frozen parameters are those from before the engine."""
    model = seeded(Stack, seed=1)
    model.head.weight.requires_grad_(False)
    with opened(model) as runner:
        runner.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ["head.weight"]
    with opened(seeded(Stack)) as runner:
        with pytest.raises(CheckpointError, match=r"head\.weight is in the model only"):
            runner.load_checkpoint(tmp_path)
        runner.load_checkpoint(tmp_path, strict=False)
        expected = {**seeded(Stack, seed=1).state_dict(), "head.weight": seeded(Stack).head.weight}
        found = runner.state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_it_does_not_train() -> None:
    with opened(seeded(Stack)) as engine:
        for call in (lambda: engine.backward(torch.ones(())), engine.step):
            with pytest.raises(UsageError, match=r"for inference: use infinity.initialize\(\)"):
                call()
        with pytest.raises(UsageError, match=r"Stack has no generate\(\)"):
            engine.generate(BATCHES[0])
        assert same(results(engine), results(seeded(Stack)))
    with pytest.raises(UsageError, match=r"closed: make a new one with infinity.init_inference\(\)"):
        engine(*BATCHES[0])
    engine.close()


def test_no_parameters() -> None:
    with pytest.raises(ModelError, match="no parameters: call the model directly"):
        opened(nn.GELU())


def test_a_bad_config() -> None:
    with pytest.raises(ConfigError, match="unknown"):
        infinity.init_inference(seeded(Stack), {"offload": "nvme"})


def test_a_model_that_is_refused_is_left_as_it_was(tmp_path: Path) -> None:
    model = seeded(Stack)
    model.head.requires_grad_(False)
    model.register_buffer("unknown", torch.empty(3, device="meta"))
    with pytest.raises(ModelError, match="buffer unknown is on the meta device"):
        opened(model, folder=tmp_path)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["head.weight"]
    assert model.training
    del model.unknown
    with opened(model) as engine:
        assert same(results(engine), results(seeded(Stack)))


def test_a_model_of_another_engine() -> None:
    model = seeded(Stack)
    with opened(model), pytest.raises(ModelError, match="already belongs to an engine"):
        opened(model)
