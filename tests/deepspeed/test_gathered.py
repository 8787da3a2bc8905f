"""`zero.GatheredParameters` without `modifier_rank`: edits are discarded where stage 3 shards, as in DeepSpeed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity.deepspeed as deepspeed
from infinity.errors import UsageError
from infinity.plan.placement import Extent
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.transfer import Transfer
from support.late_disk import LateTransfer
from support.models import Stack, seeded, token_batches

Opens = Callable[..., Any]
BATCHES = token_batches(4)


def add(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.add_(1)


def assign(weight: nn.Parameter) -> None:
    weight.data = torch.ones_like(weight)


EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": add,
    "by data": lambda weight: weight.data.mul_(3),
    "by a view": lambda weight: weight.data.view(-1)[1].fill_(9),
    "by numpy": lambda weight: weight.detach().view(torch.uint8).numpy().fill(1),
    "assigned": assign,
}


def offload(device: str, folder: Path) -> dict[str, Any]:
    place = {"device": device, "nvme_path": str(folder)} if device == "nvme" else {"device": device}
    return {"offload_param": place, "offload_optimizer": place}


def steps(engine: Any, batches: Any) -> None:
    for batch in batches:
        engine.backward(engine(*batch))
        engine.step()


@pytest.mark.parametrize("update", ["after_backward", "next_forward"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_edits_without_a_modifier_leave_no_trace(
    device: str, bf16: bool, update: str, opens: Opens, tmp_path: Path
) -> None:
    """Parameters, masters and training equal those without a block; edits from before the block stay."""
    config = {
        "bf16": {"enabled": bf16},
        "zero_optimization": offload(device, tmp_path),
        "infinity": {"unit_size": 2000, "update": update},
    }
    plain, edited = (opens(3, model=seeded(Stack), **config) for _ in range(2))
    for engine in (plain, edited):
        steps(engine, BATCHES[:1])
        add(engine.module.head.weight)
    for edit in EDITS.values():
        block = deepspeed.zero.GatheredParameters(list(edited.module.parameters()))
        with pytest.warns(UserWarning, match="without modifier_rank were discarded"), block:
            for parameter in edited.module.parameters():
                edit(parameter)
        assert torch.equal(edited.module.head.weight, plain.module.head.weight)
        steps(plain, BATCHES[1:])
        steps(edited, BATCHES[1:])
        expected = plain.module_state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in edited.module_state_dict().items())
        masters = (deepspeed.utils.safe_get_full_fp32_param(each.module.head.weight) for each in (plain, edited))
        assert torch.equal(*masters)


def test_views_show_the_values_from_before(opens: Opens) -> None:
    engine = opens(3)
    weight = engine.module.head.weight
    before = weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with deepspeed.zero.GatheredParameters(weight):
            view = weight.detach()
            view.fill_(3)
    assert torch.equal(view, before) and torch.equal(weight, before)


def test_what_else_changes_parameters_in_a_block_stays(opens: Opens) -> None:
    """Steps of the optimizer and safe_set_full_fp32_param are no edits of the gathered tensor."""
    plain, gathered = (opens(3, model=seeded(Stack)) for _ in range(2))
    steps(plain, BATCHES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with deepspeed.zero.GatheredParameters(list(gathered.module.parameters())):
            steps(gathered, BATCHES)
        assert torch.equal(gathered.module.head.weight, plain.module.head.weight)
        with deepspeed.zero.GatheredParameters(gathered.module.head.weight):
            value = torch.full_like(gathered.module.head.weight, 3.0)
            deepspeed.utils.safe_set_full_fp32_param(gathered.module.head.weight, value)
    assert (gathered.module.head.weight == 3).all()


def test_states_are_not_read_with_edits_that_are_discarded(opens: Opens, tmp_path: Path) -> None:
    """Before an edit and after the block they are."""
    engine = opens(3)
    weight = engine.module.head.weight
    before = weight.detach().clone()
    with pytest.warns(UserWarning, match="were discarded"), deepspeed.zero.GatheredParameters(weight):
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(weight), before)
        weight.data.fill_(2)
        with pytest.raises(UsageError, match="head were edited in a block of GatheredParameters without"):
            engine.save_checkpoint(tmp_path)
        with pytest.raises(UsageError, match="Save and read states after the block, or pass modifier_rank=0"):
            deepspeed.utils.safe_get_full_fp32_param(weight)
        assert (weight == 2).all()
    assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(weight), before)
    assert engine.save_checkpoint(tmp_path)


@pytest.mark.parametrize("modifier", [0, None])
def test_an_engine_may_be_destroyed_in_a_block(modifier: int | None, opens: Opens) -> None:
    """As by load_state_dict_from_zero_checkpoint, whose values stay."""
    engine = opens(3)
    model = engine.module
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=modifier):
        engine.destroy()
        nn.init.ones_(model.head.weight)
    assert (model.head.weight == 1).all()


@pytest.mark.parametrize("outer", [0, None])
def test_the_outer_block_decides(outer: int | None, opens: Opens) -> None:
    engine = opens(3)
    weight = engine.module.head.weight
    before = weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=outer):
            weight.data.fill_(1)
            with deepspeed.zero.GatheredParameters(weight):
                weight.data.fill_(2)
            assert (weight == 2).all()
    assert (weight == 2).all() if outer == 0 else torch.equal(weight, before)


def test_edits_with_a_modifier_stay_within_a_block_without(opens: Opens) -> None:
    engine = opens(3)
    first, second = engine.module.head.weight, next(iter(engine.module.parameters()))
    block = deepspeed.zero.GatheredParameters(list(engine.module.parameters()))
    with pytest.warns(UserWarning, match="were discarded"), block:
        for weight in (first, second):
            with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
                weight.data.fill_(2)
            weight.data.add_(1)
        assert (first == 3).all() and (second == 3).all()
    assert (first == 2).all() and (second == 2).all()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_edits_stay_where_parameters_are_whole(stage: int, opens: Opens) -> None:
    engine = opens(stage)
    weight = engine.module.head.weight
    with deepspeed.zero.GatheredParameters(weight):
        weight.data.fill_(2)
    assert (weight == 2).all()


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_a_state_dict_is_loaded_into_gathered_parameters(device: str, opens: Opens, tmp_path: Path) -> None:
    """Training goes on as from a model that had these values at first, with the moments of before."""
    config = {"zero_optimization": offload(device, tmp_path), "infinity": {"unit_size": 2000}}
    values = seeded(Stack, 1).state_dict()
    loaded, edited = (opens(3, model=seeded(Stack), **config) for _ in range(2))
    for engine in (loaded, edited):
        steps(engine, BATCHES[:2])
        parameters = dict(engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values()), modifier_rank=0):
            if engine is loaded:
                assert not any(engine.module.load_state_dict(values))
            else:
                for name, parameter in parameters.items():
                    parameter.data.copy_(values[name])
        steps(engine, BATCHES[2:])
    expected = edited.module_state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.module_state_dict().items())


def test_a_state_dict_needs_all_of_its_parameters(opens: Opens) -> None:
    """A part of the model may be loaded if it is gathered."""
    engine = opens(3, infinity={"unit_size": 2000})
    model, before = engine.module, engine.module_state_dict()
    with deepspeed.zero.GatheredParameters(list(model.head.parameters()), modifier_rank=0):
        with pytest.raises(UsageError, match=r"GatheredParameters\(model.parameters\(\), modifier_rank=0\)"):
            model.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
        assert torch.equal(model.head.weight, before["head.weight"])
        model.head.load_state_dict({"weight": torch.ones_like(before["head.weight"])})
    after = engine.module_state_dict()
    assert (after.pop("head.weight") == 1).all()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_edits_before_an_exception_are_discarded(opens: Opens) -> None:
    engine = opens(3)
    weight = engine.module.head.weight
    before = weight.detach().clone()
    block = deepspeed.zero.GatheredParameters(weight)
    with pytest.warns(UserWarning, match="were discarded"), pytest.raises(ValueError, match="in the block"), block:
        add(weight)
        raise ValueError("in the block")
    assert torch.equal(weight, before)


def test_a_block_is_entered_again(opens: Opens) -> None:
    engine = opens(3)
    weight = engine.module.head.weight
    block = deepspeed.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0)
    for value in (2, 3):
        with block:
            weight.data.fill_(value)
            with block:
                weight.data.mul_(-1)
        assert (weight == -value).all()


@pytest.mark.parametrize("trains_inside", [False, True])
@pytest.mark.parametrize("update", ["after_backward", "next_forward"])
def test_an_update_is_written_before_its_parameters_are_edited(
    update: str, trains_inside: bool, opens: Opens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of an fp32 update reads the buffer that a block edits, and the tier is what edits are discarded for."""
    write_at_once = NvmeTier._write

    def write(tier: NvmeTier, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        def later() -> None:
            time.sleep(0.01)  # as a slow drive
            write_at_once(tier, extent, memory, offset).wait()

        return LateTransfer(later)

    monkeypatch.setattr(NvmeTier, "_write", write)
    config = {
        "zero_optimization": offload("nvme", tmp_path),
        "infinity": {"unit_size": 2000, "update": update, "cache_bytes": 0},
    }
    plain, edited = (opens(3, model=seeded(Stack), **config) for _ in range(2))
    for batch in BATCHES[:2]:
        steps(plain, [batch])
        block = deepspeed.zero.GatheredParameters(list(edited.module.parameters()))
        if not trains_inside:
            steps(edited, [batch])
        with pytest.warns(UserWarning, match="were discarded"), block:
            if trains_inside:
                steps(edited, [batch])
            for parameter in edited.module.parameters():
                add(parameter)
    expected = plain.module_state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in edited.module_state_dict().items())
