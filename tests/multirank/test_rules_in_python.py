"""Rules in Python on several ranks: each parameter is updated whole, on the rank whose shard holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multirank import rule_cases
from support.ranks import Group

STEPS = 3


def assert_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["values"].keys() == other["values"].keys()
    assert not [name for name, value in one["values"].items() if not torch.equal(value, other["values"][name])]


@pytest.mark.parametrize("kind", ["Muon", "Adafactor", "NAdam", "a user's"])
@pytest.mark.parametrize(("param", "optim", "stage"), [("nvme", "nvme", 3), ("cpu", "cpu", 3), ("none", "nvme", 1)])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_two_ranks_are_one_that_accumulates(
    pair: Group, kind: str, param: str, optim: str, stage: int, bf16: bool, clip: float, tmp_path: Path
) -> None:
    common: dict[str, Any] = {"steps": STEPS, "folder": str(tmp_path), "kind": kind, "bf16": bf16, "clip": clip}
    common |= {"param": param, "optim": optim, "stage": stage}
    one, other = pair.run(rule_cases.training, ranks=2, **common)
    expected = rule_cases.training(0, ranks=1, **common)
    assert [sum(pair) / 2 for pair in zip(one["losses"], other["losses"], strict=True)] == expected["losses"]
    assert_bits(one, other)
    assert_bits(one, expected)
    assert one["states"] == expected["states"]
    assert one["owned"] + other["owned"] == expected["elements"]


@pytest.mark.parametrize("kind", ["Muon"])
def test_late_copies(pair: Group, kind: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {"steps": STEPS, "folder": str(tmp_path), "kind": kind}
    one, other = pair.run(rule_cases.training, ranks=2, late=True, **common)
    assert_bits(one, other)
    assert_bits(one, rule_cases.training(0, ranks=1, **common))


@pytest.mark.parametrize("kind", ["Muon", "a user's"])
def test_a_checkpoint_reshards(pair: Group, kind: str, tmp_path: Path) -> None:
    """Two ranks go on from a checkpoint of one, and one from that of two, with the bits of a run that never stopped."""
    common: dict[str, Any] = {"steps": STEPS, "folder": str(tmp_path), "kind": kind}
    one_file, two_file = str(tmp_path / "one"), str(tmp_path / "two")
    rule_cases.training(0, ranks=1, saved=one_file, **common)
    pair.run(rule_cases.training, ranks=2, saved=two_file, **common)
    expected = rule_cases.training(0, ranks=1, load=one_file, **common)
    assert_bits(rule_cases.training(0, ranks=1, load=two_file, **common), expected)
    for outcome in pair.run(rule_cases.training, ranks=2, load=one_file, **common):
        assert_bits(outcome, expected)


def test_bytes(pair: Group, tmp_path: Path) -> None:
    """A gather moves the units with their padding, and nothing else is exchanged for whole updates."""
    common: dict[str, Any] = {"steps": STEPS, "folder": str(tmp_path), "kind": "NAdam", "prefetch_bytes": 0}
    one, other = pair.run(rule_cases.training, ranks=2, **common)
    assert one["gathered"] == other["gathered"] and one["reduced"] == other["reduced"] == STEPS * 4 * one["padded"]
    assert abs(one["owned"] - other["owned"]) < 0.35 * one["elements"]
