"""Rates of the config's schedulers equal DeepSpeed's, from the first update on.

scheduler_rates.json holds the learning rates of 12 updates, of a group with lr 0.01, which DeepSpeed 0.19.8's
runtime/lr_schedules.py produces.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import ConfigError

CASES = json.loads((Path(__file__).parent / "scheduler_rates.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["type"])
def test_rates_equal_deepspeeds(opens: Callable[..., Any], case: dict[str, Any], tmp_path: Path) -> None:
    """Every update has DeepSpeed's rate, also after a checkpoint is loaded into a new engine."""
    section = {"type": case["type"], "params": case["params"]}

    def fresh() -> Any:
        return opens(model=nn.Linear(2, 2), scheduler=section, optimizer={"type": "SGD", "params": {"lr": 0.01}})

    engine, rates = fresh(), []
    for number in range(12):
        if number == 5:
            engine.save_checkpoint(tmp_path)
            engine.destroy()
            engine = fresh()
            engine.load_checkpoint(tmp_path)
        rates.append(engine.get_lr()[0])
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        assert engine.lr_scheduler.get_last_lr() == engine.get_lr()
    assert rates == pytest.approx(case["rates"], rel=1e-12, abs=1e-15)


def test_a_warm_up_of_no_steps_is_refused(opens: Callable[..., Any]) -> None:
    """DeepSpeed needs a positive number of steps."""
    with pytest.raises(ConfigError, match="warmup_num_steps is 0"):
        opens(model=nn.Linear(2, 2), scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 0}})
