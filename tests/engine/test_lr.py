"""The learning-rate schedules of the config: their formulas and bounds."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from infinity.config import Config, Scheduler
from infinity.engine import schedules
from infinity.engine.schedules.client import factor, make_scheduler

BASE = {"train_micro_batch_size_per_gpu": 1}


def schedule(name: str, **params: Any) -> Scheduler:
    found = Config.load({**BASE, "scheduler": {"type": name, "params": params}}).scheduler
    assert found is not None
    return found


def rates(wanted: Scheduler, steps: int, lr: float = 1e-2, groups: list[float] | None = None) -> list[list[float]]:
    """Return the rates of every group at each step, as the optimizer uses them."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in groups or [lr]]
    given_groups = [{"params": [p], "lr": rate} for p, rate in zip(parameters, groups or [lr], strict=True)]
    optimizer = torch.optim.AdamW(given_groups, lr=lr)
    scheduler = make_scheduler(optimizer, wanted, lr)
    assert scheduler is not None
    seen = []
    for _ in range(steps):
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


def flat(seen: list[list[float]]) -> list[float]:
    return [rate for (rate,) in seen]


def test_no_schedule() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-2)
    assert make_scheduler(optimizer, None, 1e-2) is None


def test_warmup_logarithmic() -> None:
    seen = flat(rates(schedule("WarmupLR", warmup_min_lr=1e-3, warmup_num_steps=10), 15))
    expected = [1e-3 + 9e-3 * math.log(step + 1) / math.log(10) for step in range(10)] + [1e-2] * 5
    assert seen == pytest.approx(expected)


def test_warmup_linear() -> None:
    seen = flat(rates(schedule("WarmupLR", warmup_num_steps=4, warmup_type="linear", warmup_max_lr=8e-3), 7))
    assert seen == pytest.approx([0.0, 2e-3, 4e-3, 6e-3, 8e-3, 8e-3, 8e-3])


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_no_warmup(kind: str) -> None:
    assert flat(rates(schedule("WarmupLR", warmup_num_steps=0, warmup_type=kind), 3)) == [1e-2] * 3


def test_warmup_of_one_step() -> None:
    assert flat(rates(schedule("WarmupLR", warmup_num_steps=1, warmup_type="log"), 3)) == pytest.approx([0, 1e-2, 1e-2])


def test_decay() -> None:
    wanted = schedule("WarmupDecayLR", warmup_num_steps=2, total_num_steps=6, warmup_type="linear")
    assert flat(rates(wanted, 9)) == pytest.approx([0, 5e-3, 1e-2, 7.5e-3, 5e-3, 2.5e-3, 0, 0, 0])


def test_cosine() -> None:
    wanted = schedule(
        "WarmupCosineLR",
        warmup_num_steps=2,
        total_num_steps=6,
        warmup_min_ratio=0.5,
        cos_min_ratio=0.1,
        warmup_type="linear",
    )
    half = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * part)) for part in (0, 0.25, 0.5, 0.75, 1, 1)]
    assert flat(rates(wanted, 8)) == pytest.approx([5e-3, 7.5e-3, *(1e-2 * part for part in half)])


def test_groups_keep_their_proportion() -> None:
    wanted = schedule("WarmupLR", warmup_num_steps=4, warmup_type="linear")
    seen = rates(wanted, 6, groups=[1e-2, 5e-3])
    assert all(second == pytest.approx(first / 2) for first, second in seen)
    assert seen[-1] == [1e-2, 5e-3]


def test_warmup_max_lr_is_one_rate_for_all() -> None:
    seen = rates(schedule("WarmupLR", warmup_num_steps=2, warmup_max_lr=3e-3), 4, groups=[1e-2, 5e-3])
    assert seen[-1] == pytest.approx([3e-3, 3e-3])


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]),
    kind=st.sampled_from(["log", "linear"]),
    warmup=st.integers(0, 50),
    rest=st.integers(0, 50),
    least=st.floats(0, 1),
)
def test_rises_then_falls(name: str, kind: str, warmup: int, rest: int, least: float) -> None:
    """The rate stays within 0 and the highest, does not fall in the warm-up or rise after it, and stays finite."""
    params: dict[str, Any] = {"warmup_num_steps": warmup, "warmup_type": kind}
    if name != "WarmupLR":
        params["total_num_steps"] = max(1, warmup + rest)
    if name == "WarmupCosineLR":
        params |= {"warmup_min_ratio": least, "cos_min_ratio": least / 2}
    else:
        params["warmup_min_lr"] = least * 1e-2
    of = factor(schedule(name, **params), 1e-2)
    seen = [of(step) for step in range(warmup + rest + 5)]
    assert all(-1e-12 <= part <= 1 + 1e-12 for part in seen)
    assert all(after >= before - 1e-12 for before, after in pairwise(seen[: warmup + 1]))
    assert all(after <= before + 1e-12 for before, after in pairwise(seen[warmup:]))
    if rest:
        assert seen[warmup] == pytest.approx(1.0)
    assert of(10**9) == pytest.approx({"WarmupLR": 1.0, "WarmupDecayLR": 0.0}.get(name, least / 2))


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("LRRangeTest", {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 3}),
        ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4, "decay_step_size": 2}),
    ],
)
def test_range_test_and_cycle_are_those_of_the_classes(name: str, params: dict[str, Any]) -> None:
    """Rates, and the momentum that OneCycle changes."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    expected = getattr(schedules, name)(optimizer, **params)
    ours = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    scheduler = make_scheduler(ours, schedule(name, **params), 1e-2)
    assert scheduler is not None
    seen = set()
    for _ in range(12):
        seen.add(ours.param_groups[0]["lr"])
        for key in ("lr", "betas"):
            assert ours.param_groups[0][key] == optimizer.param_groups[0][key]
        for each in (optimizer, expected, ours, scheduler):
            each.step()
    assert len(seen) > 4
