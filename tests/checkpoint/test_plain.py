"""Schedules and hyper-parameters of any kind come back as they were, from checkpoints and from durable runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.optim import lr_scheduler as torch_schedulers

import infinity
from infinity.engine.optimizer.state_dict import from_plain, to_plain
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError
from support.configs import raw
from support.models import Stack, seeded

STEPS = 8
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.floats(allow_nan=False), inner)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_a_value_survives_json(value: Any) -> None:
    found = from_plain(json.loads(json.dumps(to_plain(value, "value"))), value)
    assert repr(found) == repr(value)  # types too, which == ignores


@pytest.mark.parametrize("value", [np.float32(0.1), torch.tensor(0.1), np.float64(0.1), np.int64(3)])
def test_a_number_of_numpy_or_torch_becomes_its_value(value: Any) -> None:
    plain = to_plain({"lr": value}, "group")["lr"]
    assert type(plain) in (int, float) and plain == value.item()


@pytest.mark.parametrize("value", [object(), torch.ones(2), {(1, 2): 3}])
def test_another_value_is_named(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"schedule\.best"):
        to_plain({"best": value}, "schedule")


@pytest.mark.parametrize("pairs", [3, [3], [[1]], [[[1], 2]], [[1, 2, 3]]])
def test_an_altered_dict_raises_no_other_error(pairs: Any) -> None:
    assert from_plain({"__items__": pairs}, {}) == {"__items__": pairs}


def sequential(optimizer: Any) -> Any:
    parts = [torch_schedulers.MultiStepLR(optimizer, [2, 5], gamma) for gamma in (0.1, 0.5)]
    return torch_schedulers.SequentialLR(optimizer, parts, milestones=[3])


def chained(optimizer: Any) -> Any:
    parts = [torch_schedulers.MultiStepLR(optimizer, [2, 5]), torch_schedulers.ExponentialLR(optimizer, 0.9)]
    return torch_schedulers.ChainedScheduler(parts, optimizer)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "MultiStepLR": lambda optimizer: torch_schedulers.MultiStepLR(optimizer, [2, 5, 5, 6]),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda optimizer: torch_schedulers.ReduceLROnPlateau(optimizer, patience=0),
    "CosineAnnealingWarmRestarts": lambda optimizer: torch_schedulers.CosineAnnealingWarmRestarts(optimizer, 3, 2),
}


def opened(name: str, folder: Path, durable: bool) -> TrainingEngine:
    config = raw(folder, optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    config["infinity"]["durable"] = durable
    model = seeded(lambda: Stack(32, 2), 0)
    return infinity.initialize(model=model, config=config, lr_scheduler=SCHEDULERS[name])[0]


def rates(engine: TrainingEngine, steps: range) -> list[float]:
    """Train, and return the rate after each step."""
    found = []
    for step in steps:
        tokens = torch.randint(8, (4, 9), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        metrics = {"metrics": 1.0} if isinstance(engine.lr_scheduler, torch_schedulers.ReduceLROnPlateau) else None
        engine.step(metrics)
        found.append(engine.optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "checkpoint"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_goes_on_where_it_was(name: str, durable: bool, tmp_path: Path) -> None:
    with opened(name, tmp_path, False) as engine:
        expected = rates(engine, range(STEPS))
    assert len(set(expected)) > 2
    with opened(name, tmp_path, durable) as engine:
        found = rates(engine, range(4))
        engine.save_checkpoint(tmp_path / "saved")
    with opened(name, tmp_path, durable) as engine:
        engine.load_checkpoint(tmp_path / ("run" if durable else "saved"))
        assert found + rates(engine, range(4, STEPS)) == expected


def test_a_rate_that_cannot_be_saved_ends_no_run(tmp_path: Path) -> None:
    """The error is raised by the step, not by a commit that fails beside the next one."""
    with opened("MultiStepLR", tmp_path, True) as engine:
        rates(engine, range(2))
        group = engine.optimizer.param_groups[0]
        group["owner"] = engine
        with pytest.raises(CheckpointError, match=r"param_groups\[0\]\.owner is a TrainingEngine"):
            rates(engine, range(2, 3))
        del group["owner"]
        group["lr"] = np.float32(0.125)
        rates(engine, range(3, 4))
    with opened("MultiStepLR", tmp_path, True) as engine:
        engine.resume()
        assert engine.global_steps == 4
