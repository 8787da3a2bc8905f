"""Followed collectives cost no message; ranks notice one that departs, and exchange no wrong bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multirank import follow_cases
from support.ranks import Group

WAYS = {
    "unit": "gathers unit six",
    "kind": "reduces the gradient of unit six",
    "sums": "sums numbers of a step",
    "barrier": "waits for all",
    "broadcast": "broadcasts",
}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("number", [0, 3, 5], ids=["gather", "reduce", "sum"])
@pytest.mark.parametrize("way", WAYS)
def test_one_rank_departs(pair: Group, way: str, number: int, which: int) -> None:
    """All ranks raise the same error at once, which names the collective of each."""
    outcomes = pair.run(follow_cases.departing, number=number, ways={which: way})
    issued = [{0: "gathers unit one", 3: "reduces the gradient of unit two", 5: "sums numbers of a step"}[number]] * 2
    issued[which] = WAYS[way]
    for outcome in outcomes:
        said = (
            f"rank 0 {issued[0]}; rank 1 {issued[1]}" if issued[0] != issued[1] else "ranks 0, 1 sums numbers of a step"
        )
        if issued[0] == issued[1]:
            assert way == "sums", "of another length"
        assert outcome["raised"].startswith("the ranks issued different collectives: ")
        assert said in outcome["raised"] or way == "sums"
        assert outcome["seconds"] < 3


@pytest.mark.parametrize("number", range(7))
def test_one_rank_leaves_a_collective_out(pair: Group, number: int) -> None:
    one, other = pair.run(follow_cases.departing, number=number, ways={0: "missing"})
    assert one["raised"] == other["raised"] != ""
    assert one["raised"].startswith("the ranks issued different collectives: rank 0 ")


@pytest.mark.parametrize("number", [0, 3, 5, 6], ids=["gather", "reduce", "sum", "barrier"])
def test_one_rank_gives_up(pair: Group, number: int) -> None:
    """Others raise its error, whichever collective they wait in."""
    for outcome in pair.run(follow_cases.departing, number=number, ways={1: "raises"}):
        assert outcome["raised"].startswith("rank 1 failed: ValueError: of rank 1. Fix the error")
        assert outcome["seconds"] < 3


@pytest.mark.parametrize(
    ("ways", "who"),
    [
        ({2: "unit"}, "ranks 0, 1, 3 gathers unit one; rank 2 gathers unit six"),
        ({0: "kind", 3: "unit"}, "ranks 1, 2 gathers unit one; rank 3 gathers unit six"),
        ({0: "unit", 1: "barrier", 2: "sums"}, "rank 3 gathers unit one"),
        ({0: "unit", 1: "kind", 2: "sums", 3: "barrier"}, "rank 0 gathers unit six; rank 1 reduces"),
    ],
    ids=str,
)
@pytest.mark.parametrize("late", [0.0, 0.7])
def test_some_of_four_depart(four: Group, ways: dict[int, str], who: str, late: float) -> None:
    """Ranks may depart in different ways before one collective, and after others have waited for long."""
    outcomes = four.run(follow_cases.departing, number=0, ways=ways, late=late)
    texts = {outcome["raised"] for outcome in outcomes}
    assert len(texts) == 1
    text = texts.pop()
    assert all(part in text for part in who.split("; "))
    assert all(outcome["seconds"] < 3 + late for outcome in outcomes)


@pytest.mark.parametrize("number", [5, 6], ids=["sum", "barrier"])
def test_collectives_in_a_ring_end_too(four: Group, number: int) -> None:
    """Ranks wait for followers in a ring, not directly for the rank that departed."""
    outcomes = four.run(follow_cases.departing, number=number, ways={1: "unit"})
    assert len({outcome["raised"] for outcome in outcomes}) == 1
    assert all(outcome["seconds"] < 3 for outcome in outcomes)


def test_sets_of_gradients_that_differ(pair: Group) -> None:
    """All ranks get the union, even if one follows and the other departs by its set alone."""
    same, first, both, none = [[0], [0]], [[1], [0]], [[0, 1], [0]], [[], []]
    own = [same, same, same, first, same, both, none, first, same, same, first]
    one, other = pair.run(follow_cases.sets, own=own)
    assert one == other
    assert one[2] == 0 and one[3] > 0


def test_sets_that_always_differ_are_exchanged_before(four: Group) -> None:
    """No rank waits for one that departs: all exchange sets before they reduce."""
    own = [[[(number + rank) % 2] if rank % 2 else [0] for rank in range(4)] for number in range(9)]
    exchanges = four.run(follow_cases.sets, own=own)
    assert all(each == exchanges[0] for each in exchanges)
    assert exchanges[0][-1] == 3


def test_a_late_rank_is_waited_for(pair: Group) -> None:
    assert pair.run(follow_cases.late, seconds=0.6) == [0, 0]


@pytest.mark.parametrize("slow", [0, 1])
def test_all_ranks_depart_alike(pair: Group, slow: int) -> None:
    """Ranks exchange announcements the first time, and later only where the past leaves a choice."""
    one, other = pair.run(follow_cases.detour, slow=slow)
    assert one == other
    assert one[2] == one[7] == one[8] == 0
    assert one[5] == 1, "the first collective of a round has two successors"
    assert one[6] == 1, "a broadcast, which a rank may leave before another enters"


@pytest.mark.parametrize("seed", range(2))
def test_random_collectives_give_right_numbers(four: Group, seed: int) -> None:
    """Sums, unions and gathers stay right with ranks of unequal pace, changing sequences and differing sets."""
    outcomes = four.run(follow_cases.wandering, seed=seed, turns=30)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0]["raised"].startswith("the ranks issued different collectives: ")
    assert 0 < outcomes[0]["exchanges"] < outcomes[0]["collectives"]


def test_collectives_of_a_device_are_aborted(pair: Group) -> None:
    """A device waits for a rank that departed, as with NCCL, until its own rank aborts the collective."""
    one, other = pair.run(follow_cases.on_device, how="departs")
    assert one["raised"] == other["raised"]
    assert "rank 0 gathers unit one; rank 1 gathers unit six" in one["raised"]
    assert one["aborted"] and one["seconds"] < 3


@pytest.mark.parametrize("how", ["ends", "stops"])
def test_a_device_does_not_wait_for_a_rank_that_is_lost(how: str) -> None:
    group = Group(2)
    try:
        one, _ = group.run(follow_cases.on_device, how=how, dies=1)
    finally:
        group.stop()
    assert one["raised"].startswith("rank 1 (host ")
    assert one["aborted"] and one["seconds"] < 10


@pytest.mark.parametrize("evaluate", [False, True], ids=["", "evaluation"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stage": 2, "param": "none", "optim": "cpu", "clip": 0.3},
        {"prefetch_bytes": 0, "update": "next_forward"},
        {"accumulation": 3},
    ],
    ids=str,
)
def test_steps_of_an_engine_exchange_nothing(
    pair: Group, options: dict[str, Any], evaluate: bool, tmp_path: Path
) -> None:
    one, other = pair.run(follow_cases.engine, folder=str(tmp_path), evaluate=evaluate, **options)
    assert one == other
    assert one[0] > 0
    if not evaluate:
        assert one[4:] == [0] * 5
    assert max(one[4:]) <= 3, "where the past leaves a choice between a step and an evaluation"
