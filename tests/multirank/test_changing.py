"""Steps that each train other parameters, the same on all ranks, equal a plain loop."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from multirank.changing_cases import changed
from multirank.test_ranks import mean
from support.changing import CHANGES, draw_uses, plain_steps
from support.loops import Result, assert_close
from support.ranks import Group

OPTIONS: list[dict[str, Any]] = [
    {"stage": 3, "param": "nvme", "optim": "nvme"},
    {"stage": 2, "param": "none", "optim": "cpu"},
    {"stage": 3, "param": "cpu", "optim": "cpu", "accumulation": 2},
    {"stage": 0, "param": "none", "optim": "none", "cache_bytes": "auto"},
]


def _compare(pair: Group, steps: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    found = pair.run(changed, ranks=2, steps=steps, folder=str(tmp_path), **options)
    expected = plain_steps(steps, options.get("accumulation", 1), 0.0)
    for rank in found:
        assert_close(Result(mean(found), rank["parameters"]), expected, loss=1e-5, parameters=1e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("part", range(4))
def test_a_change_between_steps(pair: Group, part: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Every fourth of the changes, one after another in one training: a change, its way back, and steps that
    alternate.
    """
    changes = list(CHANGES.values())[part::4]
    steps = [step for one, other in changes for step in ([one] * 2 + [other] * 2 + [one, other, one])]
    _compare(pair, steps, tmp_path, options)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.slow] if n > 3 else []) for n in range(12)])
def test_drawn_steps(pair: Group, seed: int, tmp_path: Path) -> None:
    source = random.Random(1000 + seed)
    kinds = [draw_uses(source) for _ in range(3)]
    steps = [source.choice(kinds) for _ in range(6) for _ in range(source.randint(1, 3))]
    _compare(pair, steps, tmp_path, {"stage": 3, "param": "nvme", "optim": "nvme"})
