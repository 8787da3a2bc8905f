"""Prediction of collectives from earlier ones."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from infinity.comm.agreement.announcements import Agreed, Announcement, History, Operation


def wrong_predictions(history: History, units: list[int]) -> int:
    """Append gathers of `units`; return how many were not predicted."""
    wrong = 0
    for unit in units:
        announced = Announcement(Operation.ALL_GATHER, unit)
        predicted = history.predicted
        if predicted is None or predicted.announced != announced:
            wrong += 1
            predicted = Agreed(announced)
        history.append(predicted)
    return wrong


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_a_periodic_sequence_is_predicted_after_two_periods(period: list[int]) -> None:
    """Collectives may repeat within a period, which leaves several continuations."""
    history = History()
    for _ in range(2):
        wrong_predictions(history, period)
    assert wrong_predictions(history, period * 3) == 0


@given(st.lists(st.integers(0, 9), max_size=60), st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_a_period_is_predicted_again_after_a_detour(detour: list[int], period: list[int]) -> None:
    """Predictions are right once the period has gone on for longer than in the detour."""
    history = History()
    for part in (period, period, detour, *[period] * (len(detour) + 4)):
        wrong_predictions(history, part)
    assert wrong_predictions(history, period) == 0


def test_predictions_depend_on_what_was_agreed_only() -> None:
    """Flags differ between ranks, and change nothing about the next prediction."""
    one, other = History(), History()
    for unit in [0, 1, 0, 2] * 3:
        announced = Announcement(Operation.REDUCE, unit)
        one.append(Agreed(announced, own=(1,), union=(3,)))
        other.append(Agreed(announced, own=(2,), union=(3,)))
        predictions = [each.predicted and each.predicted.announced for each in (one, other)]
        assert predictions[0] == predictions[1]


@pytest.mark.parametrize("capacity", [2, 3, 8, 11])
def test_an_old_past_is_forgotten(capacity: int) -> None:
    """A period within the capacity stays predicted; a longer one raises no error."""
    history = History(capacity)
    wrong = [wrong_predictions(history, [0, 1, 2]) for _ in range(30)]
    if capacity >= 8:
        assert wrong[2:] == [0] * 28
    for length in range(1, 20):
        wrong_predictions(history, list(range(length)) * 3)
