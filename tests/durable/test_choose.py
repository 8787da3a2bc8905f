"""The commit that a run goes on from: the last one that all ranks of a generation have."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.durable.choose import Seen, Source, choose
from infinity.errors import CheckpointError

RUN = Path("/nvme/run")


def test_the_last_commit_of_all_ranks_is_chosen() -> None:
    seen = {1: Seen(2, {0: (4, 5), 1: (3, 4)}, True)}
    assert choose(2, [seen, seen], RUN) == (Source(1, 4, 2), True)


def test_ranks_on_machines_of_their_own_see_their_own_files() -> None:
    seen = [{1: Seen(2, {0: (4, 5)}, True)}, {1: Seen(2, {1: (5,)}, True)}]
    assert choose(2, seen, RUN) == (Source(1, 5, 2), True)


def test_another_number_of_ranks_or_layout_is_not_the_same() -> None:
    seen = {3: Seen(2, {0: (7,), 1: (7,)}, True)}
    assert choose(1, [seen], RUN) == (Source(3, 7, 2), False)
    assert choose(4, [seen] * 4, RUN) == (Source(3, 7, 2), False)
    other = {3: Seen(2, {0: (7,), 1: (7,)}, False)}
    assert choose(2, [seen, other], RUN) == (Source(3, 7, 2), False)


def test_a_generation_without_a_whole_commit_gives_way_to_the_one_before() -> None:
    seen = {1: Seen(2, {0: (9,), 1: (9,)}, False), 2: Seen(1, {0: ()}, True)}
    assert choose(1, [seen], RUN) == (Source(1, 9, 2), False)
    begun = {2: Seen(2, {0: (1,), 1: ()}, True)}
    assert choose(2, [begun, begun], RUN) == (None, False)


def test_nothing_is_chosen_from_an_empty_folder() -> None:
    assert choose(2, [{}, {}], RUN) == (None, False)


@pytest.mark.parametrize(
    ("generation", "problem"),
    [
        (Seen(2, {0: (5,)}, True), "files of rank 1 are missing"),
        (Seen(2, {0: (1,)}, True), "files of rank 1 are missing"),
        (Seen(2, {0: (5,), 1: (3,)}, True), "records of different steps"),
        (Seen(2, {0: (5,), 1: ()}, True, (1,)), "records of rank 1 are damaged or missing"),
        (Seen(2, {0: (), 1: ()}, True, (0, 1)), "records of rank 0, 1 are damaged or missing"),
    ],
)
def test_a_run_of_which_a_part_is_gone_is_refused(generation: Seen, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        choose(2, [{1: generation}] * 2, RUN)
