"""Data parallelism over some of the ranks: beside tensor parallelism, and in groups of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multirank import cases, mesh_cases
from multirank.test_ranks import apart, assert_bits
from support.configs import engine_config
from support.loops import open_engine
from support.models import Stack, seeded
from support.ranks import Group

STEPS = 3


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize(
    "options",
    [
        {"param": "cpu", "optim": "none", "clip": 0.3},
        {"param": "none", "clip": 0.3, "accumulation": 3, "stage": 1},
        {"param": "none", "optim": "cpu", "stage": 2, "accumulation": 2},
        {"clip": 0.3, "bf16": True, "update": "after_backward"},
    ],
    ids=str,
)
def test_two_by_two_is_one_rank(four: Group, options: dict[str, Any], sequence: bool, tmp_path: Path) -> None:
    """A model divided over two ranks, its units sharded over two: as the undivided model on all samples.

    The tolerance is that of matrix products summed in two parts; in bf16 each part is rounded by itself.
    """
    common: dict[str, Any] = {"folder": str(tmp_path), "steps": STEPS}
    outcomes = four.run(mesh_cases.trained, timeout=150, sequence=sequence, **common, **options)
    expected = cases.one_rank(STEPS, 2, folder=str(tmp_path), accumulated=True, **options)
    bf16 = options.get("bf16", False)
    for one, other in ((0, 1), (2, 3)):
        assert outcomes[one]["losses"] == outcomes[other]["losses"]
    losses = [(a + b) / 2 for a, b in zip(outcomes[0]["losses"], outcomes[2]["losses"], strict=True)]
    assert losses == pytest.approx(expected["losses"], rel=2**-9 if bf16 else 1e-6)
    for other in outcomes[1:]:
        assert_bits(outcomes[0], other)
        assert outcomes[0]["norms"] == other["norms"]
    if "clip" in options:
        assert outcomes[0]["norms"] == pytest.approx(expected["norms"], rel=2**-9 if bf16 else 1e-6)
    values = {name: outcomes[0]["values"][name] for name in expected["values"] if "/" not in name}
    assert apart({"values": values}, expected) < (2**-8 if bf16 else 1e-5)
    assert outcomes[0]["units"] == 4


def test_what_is_behind_divided_parameters(four: Group, tmp_path: Path) -> None:
    outcomes = four.run(mesh_cases.accessed, folder=str(tmp_path))
    for found in outcomes:
        assert_bits({"values": found}, {"values": outcomes[0]})
        for name in ("columns", "rows", "copied"):
            assert torch.equal(found[f"{name}/param"], found[f"{name}/set"])
            assert torch.equal(found[f"{name}/exp_avg"], found[f"{name}/set"])
            assert found[f"grad/{name}"].any() and found[f"grad/{name}/set"].eq(0.25).all()
        # Every element counts once in the norm, whether ranks divide it or all have it.
        assert float(found["norm"]) ** 2 == pytest.approx(float(found["squares"]), rel=1e-6)


def test_pairs_of_ranks_train_models_of_their_own(four: Group, pair: Group, tmp_path: Path) -> None:
    outcomes = four.run(mesh_cases.pairs, folder=str(tmp_path), steps=STEPS)
    assert [outcome["size"] for outcome in outcomes] == [2] * 4
    assert_bits(outcomes[0], outcomes[2])
    assert_bits(outcomes[1], outcomes[3])
    expected = pair.run(cases.training, ranks=2, steps=STEPS, folder=str(tmp_path))
    assert [outcomes[0]["losses"], outcomes[2]["losses"]] == [outcome["losses"] for outcome in expected]
    assert outcomes[1]["losses"] != outcomes[0]["losses"]


def test_engines_one_after_another(four: Group, tmp_path: Path) -> None:
    """Their groups are not mistaken for those that the former engine had."""
    for first, *others in four.run(mesh_cases.one_after_another, folder=str(tmp_path)):
        assert others == [first, first]


def test_groups_that_do_not_go_with_the_model(four: Group, tmp_path: Path) -> None:
    for rank, said in enumerate(four.run(mesh_cases.refused, folder=str(tmp_path))):
        assert "UsageError: process_group is a mesh of 2 dimensions ('dp', 'tp')" in said["the whole mesh"]
        assert 'mesh["dp"]' in said["the whole mesh"]
        if rank > 1:
            assert said["a group of others"].startswith(f"UsageError: rank {rank} is not in its process_group")
        assert "ModelError: parameter blocks.0.up.weight" in said["no group"]
        assert 'process_group=mesh["dp"]' in said["no group"] and said["the wrong group"] == said["no group"]
        assert 'infinity.frozen is "8bit", whose groups of 64 elements would straddle' in said["a code"]


@pytest.mark.campaign  # four jobs of four ranks
@pytest.mark.parametrize(("stage", "moments"), [(3, "fp32"), pytest.param(0, "bf16", marks=pytest.mark.slow)])
def test_checkpoints_hold_whole_parameters(four: Group, stage: int, moments: str, tmp_path: Path) -> None:
    """Saved by two times two ranks in the foreground or the background, loaded by them and by one, and the other way
    round.
    """
    options: dict[str, Any] = {"folder": str(tmp_path), "bf16": True, "moments": moments, "stage": stage}
    if stage < 3:
        options["param"] = "none"
    directory = tmp_path / "saved"
    runs = {}
    for how in ("foreground", "background"):
        runs[how] = four.run(mesh_cases.saved, timeout=150, directory=str(directory), how=how, **options)
    files = {how: {path.name: path.read_bytes() for path in (directory / how / "a").iterdir()} for how in runs}
    assert files["foreground"] == files["background"]
    again = four.run(mesh_cases.loaded, timeout=150, directory=str(directory / "background"), **options)
    for before, beside, after in zip(runs["foreground"], runs["background"], again, strict=True):
        assert before["losses"] == beside["losses"] == after["losses"]
        assert_bits(before, beside)
        assert_bits(before, after)
    model = seeded(lambda: Stack(width=32, depth=3, tied=True), 3)
    with open_engine(model, engine_config(**options)) as engine:
        engine.load_checkpoint(directory / "background")
        assert_bits({"values": mesh_cases.whole_states(engine)}, {"values": again[0]["at first"]})
        engine.save_checkpoint(directory / "one")
    for after in four.run(mesh_cases.loaded, timeout=150, directory=str(directory / "one"), **options):
        assert_bits({"values": after["at first"]}, {"values": again[0]["at first"]})
