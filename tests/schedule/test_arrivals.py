"""Gradients of a unit are complete: by their number on one rank, by the units that backward has passed on several."""

from __future__ import annotations

from hypothesis import example, given, strategies as st

from infinity.schedule.arrivals import Arrivals


def backward(arrivals: Arrivals, *units: int, in_pieces: bool = False) -> bool:
    for unit in units:
        arrivals.add(unit)
    return arrivals.end_backward(in_pieces=in_pieces)


def test_the_first_backward_completes_a_unit_with_a_gradient_of_each_parameter() -> None:
    arrivals = Arrivals()
    arrivals.add(3)
    assert 3 in arrivals and 4 not in arrivals
    assert not arrivals.may_be_complete(3, 2)
    arrivals.add(3)
    assert arrivals.may_be_complete(3, 2)


def test_later_backwards_complete_a_unit_with_the_number_of_the_last() -> None:
    arrivals = Arrivals()
    backward(arrivals, 3)
    arrivals.add(3)
    assert arrivals.may_be_complete(3, 2)
    backward(arrivals, 3, 3)
    arrivals.add(3)
    assert not arrivals.may_be_complete(3, 2)


def test_a_piece_leaves_the_numbers_of_other_pieces() -> None:
    arrivals = Arrivals()
    backward(arrivals, 1)
    backward(arrivals, 2, in_pieces=True)
    arrivals.add(1)
    assert arrivals.may_be_complete(1, 9)


def test_a_backward_without_gradients_counts_if_a_hook_cleared_one() -> None:
    arrivals = Arrivals()
    assert not backward(arrivals)
    arrivals.note_cleared()
    assert backward(arrivals) and not backward(arrivals)


def test_a_backward_that_failed_leaves_nothing() -> None:
    arrivals = Arrivals()
    arrivals.add(1)
    arrivals.note_cleared()
    arrivals.discard()
    assert not arrivals.any and not backward(arrivals)


BACKWARDS = st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12), min_size=1, max_size=6)
"""Backwards: for each event a unit, and whether its gradient arrives or it is used for the last time."""


@example([[(0, False)], [(1, True)], [(0, False)]])
@given(BACKWARDS)
def test_a_passed_unit_is_complete_once_and_never_if_it_was_late_before(
    backwards: list[list[tuple[int, bool]]],
) -> None:
    """A unit is sent early only if an earlier backward passed it, and if no gradient ever followed its last use."""
    arrivals = Arrivals()
    passed_before: set[int] = set()
    late: set[int] = set()
    for events in backwards:
        late_before, passed, done = set(late), set[int](), set[int]()
        sent: list[int] = []
        for unit, arrives in events:
            if arrives:
                arrivals.add(unit)
                late |= {unit} & passed
            else:
                done.add(unit)
                found = list(arrivals.passing(range(4), 9, done.__contains__))
                assert set(found) == (done - passed) & passed_before
                passed |= done
                sent += found
        assert len(sent) == len(set(sent))
        assert not set(sent) & late_before, "a unit that was late before was sent early"
        if arrivals.end_backward(in_pieces=False):
            passed_before = (passed_before | passed) - late


@given(BACKWARDS, st.integers(0, 3))
def test_the_unit_in_use_is_not_passed(backwards: list[list[tuple[int, bool]]], to: int) -> None:
    arrivals = Arrivals()
    for events in backwards:
        for unit, _ in events:
            arrivals.add(unit)
            assert to not in list(arrivals.passing(range(4), to, lambda _: True))
        arrivals.end_backward(in_pieces=False)
