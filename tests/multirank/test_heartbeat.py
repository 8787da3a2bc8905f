"""Signs of life between ranks: they name a rank that ended or hangs, and no rank that is busy."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from multirank import beat_cases
from support.ranks import Group


@pytest.fixture
def mortal() -> Iterator[Group]:
    """Four ranks of their own."""
    group = Group(4)
    yield group
    group.stop()


@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize(
    ("how", "cause"),
    [(signal.SIGKILL, "is lost: "), (signal.SIGSTOP, "has not responded for 1 s ")],
    ids=["KILL", "STOP"],
)
@pytest.mark.campaign(few=1)
def test_every_rank_gets_the_cause(mortal: Group, which: int, how: int, cause: str) -> None:
    """Also ranks without a connection to the one that is lost."""
    said = mortal.run(beat_cases.lost, which=which, how=int(how), dies=which)
    for rank, each in enumerate(said):
        assert rank == which or (each.startswith(f"rank {which} (host ") and cause in each)


def test_a_rank_that_holds_the_gil_is_not_lost(pair: Group) -> None:
    """It sends heartbeats without the GIL."""
    assert pair.run(beat_cases.holds_the_gil) == ["", ""]


def test_a_job_that_is_stopped_and_continued_goes_on(pair: Group) -> None:
    assert pair.run(beat_cases.all_stopped) == ["", ""]


@pytest.mark.campaign
def test_a_rank_that_continues_too_late_gets_the_cause(pair: Group) -> None:
    for said in pair.run(beat_cases.stopped_and_continued):
        assert said.startswith("rank 1 (host ") and "has not responded for 1 s (infinity.rank_timeout)" in said


@pytest.mark.campaign
def test_a_forked_child_does_not_hide_the_end_of_its_parent() -> None:
    group = Group(2)
    try:
        said, _ = group.run(beat_cases.outlived_by_a_child, dies=1)
    finally:
        group.stop()
    assert said.startswith("rank 1 (host ") and "is lost: " in said


def test_closing_does_not_wait_for_forked_children(pair: Group) -> None:
    assert max(pair.run(beat_cases.closed_beside_a_child)) < 4


def test_a_rank_that_closes_its_engine_is_named(pair: Group) -> None:
    said, _ = pair.run(beat_cases.closed)
    assert said.startswith("rank 1 (host ") and "closed its engine, or ended. Fix" in said


def test_all_ranks_are_connected_to_the_first(four: Group) -> None:
    assert four.run(beat_cases.connected) == [[3, 3], [1, 1], [1, 1], [1, 1]]
