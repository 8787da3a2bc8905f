"""`infinity.deepspeed` on two ranks: averages, sizes, local parts, edits and files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from multirank import deepspeed_cases
from multirank.cases import SAMPLES, global_batches
from support.models import Stack, seeded
from support.ranks import Group


@pytest.mark.every_case
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_ranks_train_as_one_loop(pair: Group, stage: int, tmp_path: Path) -> None:
    """Parameters, norm and clipping equal a loop over whole batches; each rank loads other samples."""
    model = seeded(Stack)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    norm = 0.0
    for number, batch in enumerate(global_batches(4, SAMPLES * 2), 1):
        (model(*batch) / 2).backward()
        if number % 2 == 0:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            optimizer.step()
            optimizer.zero_grad()
    ranks = pair.run(deepspeed_cases.trained, stage=stage, folder=str(tmp_path))
    for rank, seen in enumerate(ranks):
        assert seen["sizes"] == (2, 2, rank, 4 * SAMPLES)
        assert seen["counts"] == (2, 8 * SAMPLES, 4)
        assert seen["norm"] == pytest.approx(norm, rel=1e-5)
        assert seen["saved"] is True
        for name, value in model.state_dict().items():
            torch.testing.assert_close(seen["states"][name], value, rtol=1e-5, atol=1e-6)
        assert (seen["edited"] == 5).all()
    assert {*ranks[0]["samples"], *ranks[1]["samples"]} == set(range(13))
    written = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(written[name], value) for name, value in ranks[0]["states"].items())
    if stage == 3:
        flat = ranks[0]["states"]["head.weight"].flatten()
        length = -(-flat.numel() // 2)
        assert torch.equal(torch.cat([seen["local"] for seen in ranks])[: flat.numel()], flat)
        for seen in ranks:
            assert seen["local"].shape == (length,)
            assert (seen["set"].flatten()[:length] == 0).all() and (seen["set"].flatten()[length:] == 1).all()


@pytest.mark.parametrize("editor", [0, 1])
def test_edits_of_one_rank_without_a_modifier_are_discarded(pair: Group, editor: int, tmp_path: Path) -> None:
    case, folder = deepspeed_cases.gathered_between_steps, str(tmp_path)
    edited, plain = (pair.run(case, folder=folder, editor=each) for each in (editor, None))
    for name, value in plain[0].items():
        assert torch.equal(edited[0][name], value) and torch.equal(edited[1][name], value)


def test_rank_0_loads_a_state_dict_into_gathered_parameters(pair: Group, tmp_path: Path) -> None:
    ranks = pair.run(deepspeed_cases.gathered_between_steps, folder=str(tmp_path), editor=None, loads=True)
    for name, value in seeded(deepspeed_cases.stack, 1).state_dict().items():
        assert torch.equal(ranks[0][name], value) and torch.equal(ranks[1][name], value)


@pytest.mark.parametrize("nvme", [False, True], ids=["memory", "nvme"])
def test_a_model_built_under_init_has_rank_0s_values(pair: Group, nvme: bool, tmp_path: Path) -> None:
    """Rank 1 has no memory and no values for it before `initialize`, except in GatheredParameters."""
    model = seeded(deepspeed_cases.stack)
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    ranks = pair.run(deepspeed_cases.built, zero={"offload_param": place, "offload_optimizer": place} if nvme else {})
    weight = model.head.weight.detach()
    edited = weight.clone()
    edited[:2] = 7.0
    expected = model.state_dict() | {"head.weight": edited, "blocks.1.norm.bias": torch.full((32,), 3.0)}
    for rank, seen in enumerate(ranks):
        shown = {name: (tuple(value.shape), value.dtype, "cpu") for name, value in model.state_dict().items()}
        assert seen["shown"] == shown
        assert (seen["memory"] < 1000) == (rank == 1)
        assert torch.equal(seen["gathered"], weight)
        assert torch.equal(seen["edited"], edited)
        assert seen["equal"] == [False, True]
        for values in (seen["before"], seen["states"]):
            assert values.keys() == expected.keys()
            assert all(torch.equal(values[name], value) for name, value in expected.items())
    assert len(ranks[1]["refused"]) == len(deepspeed_cases.USES)
    for text in ranks[1]["refused"]:
        assert "parameter weight of a Linear, of shape [61, 32]" in text and "zero.GatheredParameters" in text, text
    model.load_state_dict(expected)
    (batch,) = global_batches(1, SAMPLES * 2)
    model(*batch).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    for seen in ranks:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(seen["trained"][name], value, rtol=1e-5, atol=1e-6)
            assert torch.equal(seen["returned"][name], seen["trained"][name])


def test_copies_of_modules_built_under_init_train_from_rank_0s_values(pair: Group) -> None:
    """Copies made outside of GatheredParameters have no values on rank 1 before `initialize`; an error says so."""
    model = seeded(deepspeed_cases.stack)
    model.blocks[1], model.blocks[2] = copy.deepcopy(model.blocks[0]), copy.deepcopy(model.blocks[0])
    ranks = pair.run(deepspeed_cases.copied)
    states = {name: value.clone() for name, value in model.state_dict().items()}
    (batch,) = global_batches(1, SAMPLES * 2)
    model(*batch).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    for rank, seen in enumerate(ranks):
        assert ["use and copy them on all ranks" in text for text in seen["errors"]] == [rank == 1, False]
        assert seen["states"].keys() == states.keys()
        assert all(torch.equal(seen["states"][name], value) for name, value in states.items())
        for name, value in model.state_dict().items():
            torch.testing.assert_close(seen["trained"][name], value, rtol=1e-5, atol=1e-6)


def test_ranks_whose_models_differ_under_init_raise(pair: Group) -> None:
    """A model that rank 1 alone ties is refused by `initialize` on both ranks."""
    for text in pair.run(deepspeed_cases.built_apart):
        assert "ranks" in text, text


@pytest.mark.parametrize(("kind", "depth"), [("bf16", 1), ("nvme", 2), ("stage2", 1)])
def test_an_engine_constructed_under_init_keeps_its_parameters(
    pair: Group, kind: str, depth: int, tmp_path: Path
) -> None:
    """The end of the block drops values of parameters without an engine only, and training equals that outside."""
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 2} if kind == "stage2" else {"stage": 3}
    zero |= {"offload_param": place, "offload_optimizer": place} if kind == "nvme" else {}
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "steps_per_print": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": zero,
        "bf16": {"enabled": kind == "bf16"},
        "infinity": {"unit_size": 20_000},
    }
    inside = pair.run(deepspeed_cases.initialized_inside, config=config, depth=depth)
    outside = pair.run(deepspeed_cases.initialized_inside, config=config, depth=0)
    for rank, (seen, plain) in enumerate(zip(inside, outside, strict=True)):
        assert all(torch.equal(seen["states"][name], value) for name, value in plain["states"].items())
        assert all(torch.equal(seen["restored"][name], value) for name, value in seen["states"].items())
        assert ("parameter weight of a Linear" in seen["rest"]) == (rank == 1)


def test_exceptions_end_blocks_of_init(pair: Group, tmp_path: Path) -> None:
    """A later block works as the first one, and parameters outside of blocks keep their values."""
    folders = [str(tmp_path / str(rank)) for rank in range(2)]
    for rank, seen in enumerate(pair.run(deepspeed_cases.failed_inside, folders=folders)):
        assert seen["outside"] == "" and seen["dtype"] == torch.float32
        assert ("parameter weight of a Linear" in seen["inside"]) == (rank == 1)


@pytest.mark.every_case
@pytest.mark.parametrize("stage", [0, 3])
def test_clipping_covers_the_optimizers_parameters(pair: Group, stage: int) -> None:
    """DeepSpeed's norm is that of the optimizer's parameters; in stage 0 with fp32, that of the model's."""
    model = seeded(deepspeed_cases.stack)
    optimizer = deepspeed_cases.optimizer_of_matrices(model)
    counted = list(model.parameters()) if stage == 0 else optimizer.param_groups[0]["params"]
    for batch in global_batches(2, SAMPLES * 2):
        model(*batch).backward()
        norm = nn.utils.clip_grad_norm_(counted, 0.3).item()
        assert norm > 0.3
        optimizer.step()
        model.zero_grad()
    for seen in pair.run(deepspeed_cases.trained_in_part, stage=stage):
        assert seen["norm"] == pytest.approx(norm, rel=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(seen["states"][name], value, rtol=1e-5, atol=1e-6)


def test_gathering_parameters_of_no_engine_changes_nothing(pair: Group) -> None:
    """Each rank keeps its own values of tensors that DeepSpeed does not partition."""
    for rank, seen in enumerate(pair.run(deepspeed_cases.gathered)):
        assert (seen["plain"] == rank).all() and (seen["tensor"] == rank).all()


@pytest.mark.parametrize("mode", ["Ignore", "Warn", "Fail"])
def test_tags_that_differ_by_rank(pair: Group, mode: str, tmp_path: Path) -> None:
    """All ranks save under rank 0's tag, or all raise an error that names both."""
    for error, latest in pair.run(deepspeed_cases.tagged, mode=mode, folder=str(tmp_path)):
        if mode == "Fail":
            assert error.startswith("True: the ranks save under different tags: rank 0 'tag-0', rank 1 'tag-1'")
        assert latest == ("" if mode == "Fail" else "tag-0") and bool(error) is (mode == "Fail")


@pytest.mark.parametrize("stage", [1, 2])
def test_a_derivative_on_one_rank(pair: Group, stage: int) -> None:
    """Below stage 3 the parameters are whole, so that a derivative by torch.func is no collective."""
    seen = pair.run(deepspeed_cases.derived, stage=stage)
    assert seen[0][:3] == seen[0][3:] == seen[1][3:]
