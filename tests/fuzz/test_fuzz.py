"""Fuzz cases from seeds and from hypothesis: the engine trains as the plain loop does, or raises an error by name."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fuzz import trainers
from fuzz.case import Case, case_of, cases, in_words
from fuzz.judge import judge
from infinity.plan.placement import Extent
from infinity.tiers.transfer import DONE, Transfer
from infinity.units.write_back import WriteBack
from support.late_device import LateDevice
from support.late_disk import LateNvmeTier

pytestmark = pytest.mark.campaign

SEEDS, CHUNK, IN_SUITE = 200, 20, 20
REGRESSIONS: list[int] = []
"""Seeds outside of SEEDS that found a fault, each with a comment that names it."""


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=[pytest.mark.slow] if first >= IN_SUITE else []) for first in range(0, SEEDS, CHUNK)],
)
def test_seeds(first: int) -> None:
    """Every seed trains as the plain loop does, or raises one of the engine's errors.

    The command runs them in two processes at once; a seed that hangs or crashes gives a verdict too.
    """
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "--seeds", f"{first}:{first + CHUNK}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_a_seed_that_found_a_fault(seed: int) -> None:
    verdict = judge(case_of(seed))
    assert not verdict.failed, f"{verdict.kind}: {verdict.text}"


@settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_cases_of_hypothesis(case: Case) -> None:
    """Cases drawn by hypothesis, which shrinks a failing one, are judged alike."""
    verdict = judge(case)
    assert not verdict.failed, f"{verdict.kind}: {verdict.text}"


# -- the generator itself --------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_case_everywhere() -> None:
    """Cases of the same seed are equal; a change of the digest invalidates all seeds written down before."""
    assert [case_of(seed) for seed in range(20)] == [case_of(seed) for seed in range(20)]
    assert len({in_words(case_of(seed)) for seed in range(200)}) == 200


class ForgetfulTier(LateNvmeTier):
    """Loses every twelfth write."""

    writes = 0

    def _write(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        ForgetfulTier.writes += 1
        return DONE if ForgetfulTier.writes % 12 == 0 else super()._write(extent, memory, offset)


def lose_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault: later reads return stale bytes."""
    monkeypatch.setattr(trainers.open_tiers, "NvmeTier", ForgetfulTier)


def wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault: units are used before they have arrived."""
    monkeypatch.setattr(trainers, "CpuDevice", LateDevice)
    monkeypatch.setattr(LateDevice, "await_copy", lambda self, transfer: None)


def lose_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault: edits of a parameter are lost when it leaves its buffer."""
    monkeypatch.setattr(WriteBack, "was_edited", lambda self, unit: False)


@pytest.mark.parametrize(
    ("plant", "concerns"), [(lose_writes, ""), (wait_for_nothing, ""), (lose_edits, "edit no_grad")]
)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], concerns: str) -> None:
    """A planted fault fails one of 40 cases that contain `concerns` and that pass without it. Poison shows as NaN."""
    concerned = (seed for seed in itertools.count() if concerns in in_words(case_of(seed)))
    for seed in itertools.islice(concerned, 40):
        with pytest.MonkeyPatch.context() as monkeypatch:
            plant(monkeypatch)
            found = judge(case_of(seed))
        if (found.failed or found.kind == "not finite") and judge(case_of(seed)).kind.startswith("same"):
            return
    pytest.fail(f"40 seeds did not find {plant.__name__}")
