"""A rank ends, hangs or fails in mid-training: the others raise its cause soon, stop, and leave no files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from multirank import death_cases, odd_cases
from support.cover import pairwise_cover
from support.ranks import Group

WHERE = ["forward", "backward", "step"]
SAVES = ["save", "background save"]
LOST = {
    # The parent may have the exit status already.
    "killed": r"is lost: (it was killed by signal 9 \(SIGKILL\), often by the out|its process has ended: see its last)",
    "exits": r"is lost: (it ended with exit status 1|its process has ended): see its last messages",
    "stopped": r"has not responded for 2 s \(infinity\.rank_timeout\): its process is stopped \(SIGSTOP",
}
FAILED = {
    "raises": "ValueError: the user's own",
    "MemoryError": "MemoryError",
    "allocation": r"RuntimeError: .*can't allocate memory",
}
SOON = 100
"""Seconds that a test waits, fewer than the process group's 120."""


@pytest.fixture(scope="module")
def mortal() -> Iterator[Group]:
    """Two ranks of their own, of which one ends in every test."""
    group = Group(2)
    yield group
    group.stop()


def check(said: dict[str, str], rank: int, cause: str, folder: Path) -> None:
    assert re.search(rf"RanksError: rank {rank} \(host .+, pid \d+\) {cause}", said["raised"], re.S)
    assert said["raised"].endswith("Fix the error and restart all ranks.")
    assert os.listdir(folder) in ([], ["saved"])
    assert not (folder / "saved").exists() or os.listdir(folder / "saved") == []


CASES = [(where, how, stage) for where in WHERE for how in LOST for stage in (3, 0)]
CASES += [(where, how, 3) for where in SAVES for how in LOST]
PLAIN = [("forward", "killed", 3), ("backward", "stopped", 0)]


@pytest.mark.parametrize(
    ("where", "how", "stage"),
    [pytest.param(*case, marks=[] if case in PLAIN else [pytest.mark.campaign(few=2)]) for case in CASES],
)
def test_a_rank_that_is_lost(mortal: Group, where: str, how: str, stage: int, tmp_path: Path) -> None:
    """Found by the heartbeat, and not by the two minutes of the process group."""
    options = {"folder": str(tmp_path), "where": where, "how": how, "stage": stage}
    said, _ = mortal.run(death_cases.left_alone, timeout=SOON, dies=1, **options)
    check(said, 1, LOST[how], tmp_path)
    if where != "save":  # an engine is intact after a save that failed, until its next collective
        assert re.search(r"pid \d+", said["raised"])[0] in said["stopped"]  # type: ignore[index]


@pytest.mark.parametrize("collective", ["gather", pytest.param("reduce", marks=pytest.mark.campaign), "save"])
def test_a_rank_that_is_killed_in_a_large_exchange(mortal: Group, collective: str) -> None:
    """gloo does not end the wait for a message in transit."""
    (said, closing), _ = mortal.run(death_cases.killed_in_transit, timeout=SOON, dies=1, collective=collective)
    assert re.match(rf"rank 1 \(host .+, pid \d+\) {LOST['killed']}", said)
    assert closing < 4


FAILURES = [(where, how, stage) for where in WHERE for how in FAILED for stage in (3, 0)]


@pytest.mark.parametrize(
    ("where", "how", "stage"),
    [
        pytest.param(*case, marks=[] if case in pairwise_cover(FAILURES)[:3] else [pytest.mark.campaign(few=2)])
        for case in FAILURES
    ],
)
def test_a_rank_that_fails(pair: Group, where: str, how: str, stage: int, tmp_path: Path) -> None:
    """By an error of the user's own or too little memory, while its process lives on; the next engine works."""
    options = {"folder": str(tmp_path), "where": where, "how": how, "stage": stage}
    said, other = pair.run(death_cases.left_alone, timeout=SOON, **options)
    assert re.match(FAILED[how], other["raised"], re.S)
    check(said, 1, f"failed: {FAILED[how]}", tmp_path)
    assert pair.run(odd_cases.odd, folder=str(tmp_path), which=1) == [{}, {}]


@pytest.mark.parametrize("how", FAILED)
def test_a_rank_that_fails_in_a_save(pair: Group, how: str, tmp_path: Path) -> None:
    """The save fails with the cause on all ranks, and leaves nothing; the engines go on."""
    options = {"folder": str(tmp_path), "where": "save", "how": how, "stage": 3}
    said, other = pair.run(death_cases.left_alone, timeout=SOON, **options)
    for each, who in ((said, "rank 1 failed: "), (other, "")):
        found = (
            rf"CheckpointError: the checkpoint .* could not be written: {who}(\w+: )?{FAILED[how].rpartition(': ')[2]}"
        )
        assert re.match(found, each["raised"], re.S)
    assert not (tmp_path / "saved").exists()


def test_a_rank_that_ends_before_the_groups_are_made(mortal: Group) -> None:
    """While torch connects them, no heartbeat tells of it."""
    said, _ = mortal.run(death_cases.makes_a_group_alone)
    mortal.stop()
    assert re.match(r"the ranks could not connect to each other \(.+\)\. Another rank probably ended", said, re.S)
