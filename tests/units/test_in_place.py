"""Units in place: inference uses a unit that is whole in memory of the model's device where it is stored."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
import infinity.deepspeed as deepspeed
from infinity.engine.describe import describe
from infinity.engine.inference import InferenceEngine
from infinity.errors import OutOfMemoryError, UsageError
from infinity.plan.policy import DeviceInfo, RankInfo, used_in_place
from infinity.tiers.device import CpuDevice
from plan.test_plan import CountingDevice
from support.configs import engine_config
from support.late_device import LateDevice
from support.lifetime import Residents, assert_nothing_leaked, pool_buffers
from support.loops import open_engine
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(3)
IN_MEMORY = pytest.mark.parametrize("param", ["none", "cpu"])


def opened(param: str = "cpu", seed: int = 0, device: CpuDevice | None = None, **options: Any) -> InferenceEngine:
    config = engine_config(param, **{"prefetch_bytes": 0, **options})
    return infinity.init_inference(seeded(Stack, seed=seed), config, device=device or CpuDevice())


def results(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(*batch) for batch in BATCHES]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@IN_MEMORY
@pytest.mark.parametrize("stage", [0, 3])
def test_nothing_is_fetched_or_allocated_for_it(param: str, stage: int) -> None:
    """Each parameter views its extent, and the plan counts no buffers, as the device allocates none."""
    if stage == 0 and param == "cpu":
        pytest.skip("stage 0 has its parameters on the device")
    device = CountingDevice()
    with opened(param, device=device, stage=stage, optim="none") as engine:
        plan = engine.parts.plan
        held = {"device": device.device_bytes, "host": device.host_bytes, "nvme": 0}
        assert held == plan.nbytes() == engine.ledger.tier_bytes()
        assert sum(held.values()) == sum(plan.placement.nbytes.values())
        assert (plan.prefetch_bytes, plan.cached_bytes, plan.least_unit_bytes) == (0, 0, 0)
        assert f"{len(engine.units)} units in place" in describe(plan)
        assert same(results(engine), results(seeded(Stack)))
        (slab,) = engine.parts.tiers.values()
        for unit in engine.units:
            extent = plan.placement.of(unit.index, "param")  # type: ignore[arg-type]
            address = slab.memory(extent).data_ptr()  # type: ignore[union-attr]
            assert unit.parameters[0].data_ptr() == address + unit.layout.slots[0].offset * unit.layout.dtype.itemsize
        assert engine.ledger.snapshot().fetches == 0
        assert_nothing_leaked(engine)


def test_it_needs_a_whole_unit_in_memory_of_the_model(tmp_path: Path) -> None:
    """A disk, a device with memory of its own, shards of several ranks, and training have buffers."""
    with opened("nvme", folder=tmp_path) as engine:
        assert not engine.parts.plan.in_place and pool_buffers(engine)
    with infinity.init_inference(seeded(Stack), engine_config("cpu"), device=LateDevice()) as engine:
        assert not engine.parts.plan.in_place and pool_buffers(engine)
    with open_engine(seeded(Stack), engine_config("cpu", "cpu")) as trained:
        assert not trained.parts.plan.in_place
        placement = trained.parts.plan.placement
    assert len(used_in_place(placement, RankInfo(2, 1), DeviceInfo())) == len(trained.units)
    assert not used_in_place(placement, RankInfo(2, 2), DeviceInfo())


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9])
def test_a_budget_mixes_both(kept: float, tmp_path: Path) -> None:
    """Units on NVMe take turns in buffers, which those in place neither need nor give."""

    def make() -> Stack:
        return Stack(depth=8)

    parameters = sum(parameter.numel() for parameter in make().parameters())
    memory = {"host_params": int(kept * parameters)}
    config = engine_config("nvme", folder=tmp_path, prefetch_bytes=0, unit_size=30_000, memory=memory)
    expected = results(seeded(make))
    with infinity.init_inference(seeded(make), config, device=CpuDevice()) as engine:
        in_place = engine.parts.plan.in_place
        assert 0 < len(in_place) < len(engine.units)
        assert engine.parts.plan.nbytes() == engine.ledger.tier_bytes()
        residents = Residents(engine)
        for _ in range(3):
            before = engine.ledger.snapshot()
            assert same(results(engine), expected)
        moved = engine.ledger.snapshot() - before
        assert 0 < moved.fetches <= len(BATCHES) * (len(engine.units) - len(in_place))
        assert residents.most <= pool_buffers(engine) + len(in_place)
        assert all(engine.units[index].lease is not None for index in in_place)
        assert_nothing_leaked(engine)


EDITS: dict[str, Callable[[Any], Any]] = {
    "in place": lambda weight: weight.data.mul_(3),
    "by a view": lambda weight: weight.detach().view(-1)[1:5].fill_(9),
    "by numpy": lambda weight: weight.detach().numpy().fill(0.5),
    "assigned": lambda weight: setattr(weight, "data", torch.ones_like(weight)),
}


@IN_MEMORY
@pytest.mark.parametrize("edit", EDITS)
def test_edits_are_in_the_tier_at_once(edit: str, param: str, tmp_path: Path) -> None:
    plain = seeded(Stack)
    with opened(param) as engine:
        for _ in range(2):
            for model in (plain, engine.module):
                EDITS[edit](model.blocks[1].up.weight)  # type: ignore[union-attr,index]
            assert same(results(engine), results(plain))
            state = engine.state_dict()
            assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
        engine.save_checkpoint(tmp_path)
    with opened(param, seed=1) as other:
        other.load_checkpoint(tmp_path)
        assert same(results(other), results(plain))


def test_views_follow_and_cost_no_buffer(tmp_path: Path) -> None:
    """A view shows loads and edits, and edits by it count, whether its unit is bound or not."""
    with opened(seed=1) as saved:
        saved.save_checkpoint(tmp_path)
        expected = saved.state_dict()
    with opened() as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        model: Any = engine.module
        views = {name: parameter.detach() for name, parameter in model.named_parameters()}
        engine.settle()
        engine.load_checkpoint(tmp_path)
        assert all(torch.equal(view, expected[name]) for name, view in views.items())
        views["head.weight"].fill_(2)
        assert (engine.state_dict()["head.weight"] == 2).all() and (model.head.weight == 2).all()
        assert not engine.parts.store.kept._kept and not engine.parts.store.kept.warned
        infinity.set_full_fp32_param(model.head.weight, torch.full_like(model.head.weight, 4))
        assert (views["head.weight"] == 4).all()


@pytest.mark.parametrize("restore", [False, True])
def test_after_close_the_model_has_copies_and_views_stay_valid(restore: bool) -> None:
    engine = opened()
    weight = engine.module.head.weight  # type: ignore[union-attr]
    view = weight.detach()  # type: ignore[union-attr,operator]
    expected = view.clone()
    engine.close(restore=restore)
    assert torch.equal(weight, expected) and weight.data_ptr() != view.data_ptr()  # type: ignore[arg-type,union-attr,operator]
    del engine
    gc.collect()
    assert torch.equal(view, expected)
    assert same(results(seeded(Stack)), results(seeded(Stack)))


@IN_MEMORY
def test_debug_poisons_no_extent(param: str) -> None:
    with opened(param, debug=True) as engine:
        expected = results(engine)
        for _ in range(3):
            engine.settle()
            assert same(results(engine), expected)


def test_gradients_of_inputs_and_modes() -> None:
    """Autograd saves parameters that were bound in inference mode, and finds them after a release."""
    x = torch.randn(3, 16)

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))

    engine = infinity.init_inference(seeded(make), engine_config("cpu", unit_size=200), device=CpuDevice())
    with torch.inference_mode():
        engine(x)
    found: list[Any] = []
    for model in (seeded(make), engine):
        leaf = x.clone().requires_grad_()
        loss = model(leaf).square().sum()
        if model is engine:
            engine.settle()
        loss.backward()
        found.append(leaf.grad)
    assert torch.equal(*found)
    engine.close()


# -- edits that are discarded ------------------------------------------------------------------------------------------


def test_edits_are_discarded_by_a_copy() -> None:
    """In a block of DeepSpeed's GatheredParameters without modifier_rank; its end frees the copies."""
    with opened() as engine:
        write_back, parameters = engine.parts.store.write_back, list(engine.module.parameters())
        expected, views = engine.state_dict(), [parameter.detach() for parameter in parameters]
        for edit in EDITS.values():
            if edit is EDITS["assigned"]:
                views.clear()
            with (
                pytest.warns(UserWarning, match="without modifier_rank were discarded"),
                deepspeed.zero.GatheredParameters(parameters),
            ):
                for parameter in parameters:
                    edit(parameter)
                with pytest.raises(UsageError, match="were edited in a block of GatheredParameters"):
                    engine.settle()
            assert not write_back._before and not write_back._held_back
            state = engine.state_dict()
            assert all(torch.equal(state[name], value) for name, value in expected.items())
            assert all(torch.equal(view, each) for view, each in zip(views, parameters, strict=False))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with deepspeed.zero.GatheredParameters(parameters):
                results(engine)


def test_an_inner_block_and_a_set_state_are_kept() -> None:
    with opened() as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        weight: Any = engine.module.head.weight
        with deepspeed.zero.GatheredParameters(weight), deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
            weight.data.fill_(3)
        assert (weight == 3).all()
        with deepspeed.zero.GatheredParameters(weight):
            infinity.set_full_fp32_param(weight, torch.full_like(weight, 5))
        assert (weight == 5).all()
        warnings.simplefilter("ignore")
        with deepspeed.zero.GatheredParameters(weight):
            infinity.set_full_fp32_param(weight, torch.full_like(weight, 6))
            weight.data.fill_(7)
        assert (weight == 6).all()


def test_copies_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as engine:
        parameters = list(engine.module.parameters())
        monkeypatch.setattr(engine.parts.device, "available_bytes", lambda: 1000)
        with (
            pytest.raises(OutOfMemoryError, match="for the parameters of GatheredParameters"),
            deepspeed.zero.GatheredParameters(parameters),
        ):
            raise AssertionError
        with infinity.GatheredParameters(parameters):  # which discards nothing, so it copies nothing
            pass
        assert not any(unit.pin_count for unit in engine.units)
