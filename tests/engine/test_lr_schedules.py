"""Scheduler classes with DeepSpeed's names: rates, momentum, states and refusals.

`deepspeed_lr_schedules.json` holds the rates of the classes in DeepSpeed 0.19.8's runtime/lr_schedules.py: 30 updates
of AdamW with two groups, of rates 0.01 and 0.005.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.config import Config
from infinity.engine import schedules
from infinity.engine.schedules.client import make_scheduler
from infinity.engine.schedules.formulas import Warmup
from infinity.errors import ConfigError, UsageError

TABLE: list[dict[str, Any]] = json.loads(Path(__file__).with_name("deepspeed_lr_schedules.json").read_text())


def two_groups(kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (1e-2, 5e-3)]
    made: torch.optim.Optimizer = kind(groups, **options)
    return made


def make(row: dict[str, Any], optimizer: Any, **more: Any) -> Any:
    return getattr(schedules, row["type"])(optimizer, **row["params"], **more)


@pytest.mark.parametrize("row", TABLE, ids=[f"{number}-{row['type']}" for number, row in enumerate(TABLE)])
def test_equal_to_deepspeed(row: dict[str, Any]) -> None:
    optimizer = two_groups()
    scheduler = make(row, optimizer)
    betas = row.get("betas", [[[0.9, 0.999]] * 2] * len(row["lr"]))
    for rates, pairs in zip(row["lr"], betas, strict=True):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(rates, rel=1e-12, abs=0)
        for group, pair in zip(optimizer.param_groups, pairs, strict=True):
            assert list(group["betas"]) == pytest.approx(pair, rel=1e-12)
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        scheduler.step()


@pytest.mark.parametrize("row", TABLE, ids=[f"{number}-{row['type']}" for number, row in enumerate(TABLE)])
def test_resumes(row: dict[str, Any]) -> None:
    """A scheduler that loads a state continues with the same rates, as does one that starts at the saved iteration."""
    first = make(row, two_groups())
    for _ in range(11):
        first.step()
    loaded, started = two_groups(), two_groups()
    second = make(row, loaded)
    second.load_state_dict(first.state_dict())
    third = make(row, started, last_batch_iteration=10)
    assert [group["lr"] for group in started.param_groups] == [1e-2, 5e-3]
    with pytest.raises(UsageError, match=r"call scheduler\.step\(\)"):
        third.get_last_lr()
    for scheduler, optimizer in ((second, loaded), (third, started)):
        scheduler.step()
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(row["lr"][12], rel=1e-12)


def test_step_to_an_iteration() -> None:
    optimizer = two_groups()
    scheduler = schedules.WarmupLR(optimizer, warmup_num_steps=10, warmup_type="linear")
    scheduler.step(5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([5e-3, 2.5e-3])
    assert scheduler.state_dict() == {"last_batch_iteration": 5}


def test_tensor_rates_are_written_in_place() -> None:
    """A rate that is a tensor stays the same object, and its original value stays the end of the warm-up."""
    rate = torch.tensor(1e-2)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=rate, foreach=False)
    scheduler = schedules.WarmupLR(optimizer, warmup_num_steps=2)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0
    for _ in range(3):
        scheduler.step()
    assert rate.item() == pytest.approx(1e-2)


def test_a_wrapped_optimizer() -> None:
    class Wrapper:
        optimizer = two_groups()

    schedules.LRRangeTest(Wrapper())
    assert Wrapper.optimizer.param_groups[0]["lr"] == 1e-3


def test_momentum_without_betas(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = two_groups(torch.optim.SGD, momentum=0.7)
    scheduler = schedules.OneCycle(optimizer, 1e-3, 1e-2)
    assert "SGD has no betas" in caplog.text
    assert scheduler.get_mom() is None
    scheduler.step()
    assert optimizer.param_groups[0]["momentum"] == 0.7


def test_a_warmup_longer_than_the_schedule_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    schedules.WarmupDecayLR(two_groups(), total_num_steps=3, warmup_num_steps=6)
    assert "total_num_steps (3) is less than warmup_num_steps (6)" in caplog.text


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps is 0"),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 2.5}, "warmup_num_steps is 2.5"),
        ("WarmupLR", {"warmup_max_lr": [1.0, 2.0, 3.0]}, "warmup_max_lr has 3 values and the optimizer 2"),
        ("LRRangeTest", {"lr_range_test_step_size": -1}, "lr_range_test_step_size is -1"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 0}, "0 steps up"),
    ],
)
def test_refusals(name: str, params: dict[str, Any], said: str) -> None:
    """A refused scheduler leaves the optimizer's rates unchanged."""
    optimizer = two_groups()
    with pytest.raises(ConfigError, match=said):
        getattr(schedules, name)(optimizer, **params)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 5e-3]


def test_no_optimizer() -> None:
    with pytest.raises(UsageError, match="optimizer is a list"):
        schedules.WarmupLR([])


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_config_and_classes_share_the_formula(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front doors have equal rates in the warm-up, except that the classes have the first rate twice. Both change
    with `Warmup.rise`."""
    params = {"warmup_num_steps": 6, "warmup_type": kind} | ({} if name == "WarmupLR" else {"total_num_steps": 20})
    section = Config.load({"train_micro_batch_size_per_gpu": 1, "scheduler": {"type": name, "params": params}})

    def rates(make: Callable[[torch.optim.Optimizer], Any]) -> list[float]:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3)
        scheduler, seen = make(optimizer), []
        for _ in range(7):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return seen

    def both() -> tuple[list[float], list[float]]:
        classes = rates(lambda optimizer: getattr(schedules, name)(optimizer, **params))
        return rates(lambda optimizer: make_scheduler(optimizer, section.scheduler, 1e-3)), classes

    config, classes = both()
    assert classes == [config[0], *config[:-1]]
    monkeypatch.setattr(Warmup, "rise", lambda self, iteration: 0.25)
    config, classes = both()
    assert set(config[:6]) == set(classes[1:]) == {0.25e-3}
