"""The campaign: its draws, its detection of wrong numbers and left-over files, and some of its trainings."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from faults import judge
from faults.cases import KILLS, NEED_CHECKSUMS, NEED_DURABLE, NEED_RANKS, WEIGHTS, draw
from faults.judge import Judge, Reference, Verdict, Wrong, check_same
from support import room

BENCH = Path(__file__).parents[2] / "bench"
FOUND = (20, 105, 106, 221, 605, 716, 973, 1879, 2056, 2062, 6419, 8010, 8335, 9302)
"""Numbers of trainings that found faults of the engine, which are fixed."""


def first_of(kind: str, ranks: int) -> int:
    numbers = range(1000)
    return next(n for n in numbers if (draw(n).fault.kind, draw(n).setting.ranks) == (kind, ranks))


def test_a_number_draws_the_same_training_every_time() -> None:
    assert [draw(number) for number in range(50)] == [draw(number) for number in range(50)]


def test_every_fault_is_drawn_where_it_can_happen() -> None:
    drawn = [draw(number) for number in range(3000)]
    assert {case.fault.kind for case in drawn} == set(WEIGHTS)
    for case in drawn:
        kind, setting = case.fault.kind, case.setting
        assert setting.checksum or kind not in NEED_CHECKSUMS
        assert setting.durable or kind not in NEED_DURABLE
        assert setting.ranks == 2 or kind not in NEED_RANKS
        assert case.fault.rank < setting.ranks
    assert sum(case.fault.kind in KILLS for case in drawn) > 600
    assert sum(case.setting.ranks == 2 for case in drawn) > 300


@pytest.mark.parametrize(
    ("losses", "digests", "whole"),
    [
        ([{0: "a", 1: "c"}], None, False),
        ([{0: "a"}], None, True),
        ([{0: "a", 1: "b"}], ["other"], True),
    ],
    ids=["another loss", "a step is missing", "other parameters"],
)
def test_other_numbers_are_found(losses: list[dict[int, str]], digests: list[str] | None, whole: bool) -> None:
    expected = Reference([{0: "a", 1: "b"}], ["digest"], [{}])
    check_same([{0: "a", 1: "b"}], ["digest"], expected, whole=True)
    with pytest.raises(Wrong, match="wrong numbers"):
        check_same(losses, digests, expected, whole=whole)


def test_a_step_that_is_trained_again_with_another_loss_is_found(tmp_path: Path) -> None:
    (tmp_path / "losses-0").write_text("0 a\n1 b\n1 b\n")
    assert judge.losses_of(str(tmp_path), 0) == {0: "a", 1: "b"}
    (tmp_path / "losses-0").write_text("0 a\n1 b\n1 c\n")
    with pytest.raises(Wrong, match="step 1 has another loss"):
        judge.losses_of(str(tmp_path), 0)


@pytest.mark.campaign(few=6)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_training_with_each_fault(kind: str, tmp_path: Path) -> None:
    """On one rank where the fault can happen there, and on two."""
    judged = Judge(str(tmp_path))
    for ranks in (1, 2):
        if ranks == 2 or kind not in NEED_RANKS:
            verdict = judged.judge(draw(first_of(kind, ranks)))
            assert not verdict.failed, verdict


@pytest.mark.campaign
@pytest.mark.timeout(400)
def test_trainings_that_found_faults(tmp_path: Path) -> None:
    for number in FOUND:
        verdict = Judge(str(tmp_path)).judge(draw(number))
        assert not verdict.failed, verdict


@pytest.mark.campaign
def test_a_journal_is_gone_on_with(tmp_path: Path) -> None:
    journal, command = tmp_path / "journal", [sys.executable, str(BENCH / "campaign.py"), "--results", str(tmp_path)]
    flags = ["--journal", str(journal), "--nvme-path", str(room.in_memory() or tmp_path)]
    of_other_code = {"code": "other", **asdict(Verdict(3, "slow drive", 1, durable=False))}
    for runs in (2, 4):
        done = subprocess.run([*command, *flags, "--runs", str(runs)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "2 of 2 in" in done.stderr
        assert ("verdicts on other code, not counted: 1" in done.stderr) == (runs == 4)
        with journal.open("a") as file:
            file.write(json.dumps(of_other_code) + "\n")
    assert [json.loads(line)["seed"] for line in journal.read_text().splitlines()] == [0, 1, 3, 2, 3, 3]
    found = json.loads((tmp_path / "campaign.json").read_text())
    assert sum(row["runs"] for row in found["kinds"].values()) == 4
    assert (tmp_path / "campaign.md").read_text().count("| all | 4 |") == 1
