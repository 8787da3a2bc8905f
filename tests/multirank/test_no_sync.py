"""`no_sync`: micro-batches that are never the last of their step, on one rank and on two."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.errors import UsageError
from multirank import no_sync_cases as cases
from multirank.cases import part
from multirank.test_ranks import apart, assert_bits, mean
from support.loops import open_engine
from support.models import token_batches
from support.ranks import Group

UPDATES = ["during_backward", "next_forward", "after_backward"]
MIXED: list[cases.Step] = [(0, 3), (0, 3), (2, 1), (3, 0), (1, 2)]
"""Steps of three micro-batches; the trace is known from the second one on."""
LONGER: list[cases.Step] = [(0, 2), (5, 1), (4, 0), (1, 1)]
"""With gradient_accumulation_steps 2."""


def placements() -> Iterator[Any]:
    """Every stage with every update; half of them, with each of both, are not slow."""
    for number, (stage, update) in enumerate(product([0, 1, 2, 3], UPDATES)):
        optim = ["none", "cpu", "nvme"][(number + stage) % 3]
        tiers = {"param": optim if stage == 3 else "none", "optim": optim}
        marks = [pytest.mark.slow] if number % 2 else []
        yield pytest.param(stage, update, tiers, marks=marks, id=f"{stage}-{update}-{optim}")


@pytest.mark.parametrize(("stage", "update", "tiers"), list(placements()))
def test_as_many_micro_batches_give_the_same_bits(
    stage: int, update: str, tiers: dict[str, str], tmp_path: Path
) -> None:
    """One rank; entered and left in mid-training, with all micro-batches of a step in the block, some or none."""
    common: dict[str, Any] = {
        "ranks": 1,
        "folder": str(tmp_path),
        "accumulation": 3,
        "stage": stage,
        "bf16": stage != 2,
    }
    found = cases.held_back(0, steps=MIXED, update=update, **common, **tiers)
    expected = cases.held_back(0, steps=MIXED, in_block=False, **common, **tiers)
    assert found["losses"] == expected["losses"]
    assert_bits(found, expected)


@pytest.mark.parametrize(("stage", "update", "tiers"), list(placements()))
def test_two_ranks_give_the_same_bits(
    pair: Group, stage: int, update: str, tiers: dict[str, str], tmp_path: Path
) -> None:
    common: dict[str, Any] = {"ranks": 2, "folder": str(tmp_path), "accumulation": 3, "stage": stage, "bf16": True}
    found = pair.run(cases.held_back, steps=MIXED, update=update, own=stage % 2 == 0, **common, **tiers)
    expected = pair.run(cases.held_back, steps=MIXED, in_block=False, **common, **tiers)
    assert [outcome["losses"] for outcome in found] == [outcome["losses"] for outcome in expected]
    for outcome in found:
        assert_bits(outcome, expected[0])


@pytest.mark.parametrize(
    ("stage", "update", "own"),
    [
        (0, "during_backward", True),
        (1, "during_backward", False),
        (2, "during_backward", False),
        (3, "during_backward", True),
        (1, "next_forward", True),
        (3, "next_forward", False),
    ],
)
def test_more_micro_batches_than_accumulation(pair: Group, stage: int, update: str, own: bool, tmp_path: Path) -> None:
    """The user decides where a step ends: as a plain loop, on one rank and on two."""
    options: dict[str, Any] = {"param": "none", "accumulation": 2, "stage": stage, "eps": 1e-4, "own": own}
    options |= {"folder": str(tmp_path), "steps": LONGER, "update": update}
    config = cases.config_of(str(tmp_path), 2, param="none", eps=1e-4)
    for ranks in (1, 2):
        outcomes = (
            [cases.held_back(0, ranks=1, **options)] if ranks == 1 else pair.run(cases.held_back, ranks=2, **options)
        )
        losses, parameters = cases.plainly(ranks, LONGER, config)
        assert mean(outcomes) == pytest.approx(losses, rel=1e-6)
        assert apart(outcomes[0], {"values": parameters}) <= 1e-6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_exchanged(pair: Group, stage: int, tmp_path: Path) -> None:
    """Stages 0 and 1: each unit once a step, after the block. Stages 2 and 3: each unit once a micro-batch."""
    options: dict[str, Any] = {"param": "none", "optim": "none", "prefetch_bytes": "1GiB", "accumulation": 2}
    name = "all_reduces" if stage == 0 else "reduce_scatters"
    for found in pair.run(cases.held_back, ranks=2, folder=str(tmp_path), steps=LONGER, stage=stage, **options):
        units = found["units"]
        for (inside, outside), (block, after) in zip(LONGER, found["exchanged"], strict=True):
            if stage >= 2:
                assert (block[name], after[name]) == (inside * units, outside * units)
            else:
                assert block[name] == 0
                assert after[name] == units
            assert {block[other] + after[other] for other in ("all_reduces", "reduce_scatters") if other != name} == {0}


def test_what_cannot_be(tmp_path: Path) -> None:
    batches = [part(batch, 0) for batch in token_batches(4)]
    with open_engine(cases.model(), cases.config_of(str(tmp_path), 2)) as engine:
        with engine.no_sync():
            with engine.no_sync():
                engine.backward(engine(*batches[0]))
            for step in (engine.step, engine.optimizer.step):
                with pytest.raises(UsageError, match=r"in an engine\.no_sync\(\) block: call it after the block"):
                    step()
        engine.step()
        assert engine.micro_steps == 1, "one micro-batch is no step"
        loss = engine(*batches[1])
        with pytest.raises(KeyError), engine.no_sync():
            engine.backward(loss)  # what counts is where backward is called
            raise KeyError
        assert engine.updates.gradients.units and not engine.parts.schedule.step.is_complete
        engine.backward(engine(*batches[2]))
        with engine.no_sync(), pytest.raises(UsageError, match="for several backwards a step, set gradient_accu"):
            engine.backward(engine(*batches[3]))
        engine.step()
        assert engine.global_steps == 1
        assert all(torch.isfinite(value).all() for value in engine.state_dict().values())
