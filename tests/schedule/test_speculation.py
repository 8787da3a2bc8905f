"""When a step tries drafts."""

from __future__ import annotations

from infinity.schedule.speculation import PATIENCE, Speculation


def test_drafts_are_tried_at_once_and_for_their_units_only() -> None:
    speculation = Speculation([1, 2])
    assert [speculation.may_draft(unit) for unit in range(4)] == [False, True, True, False]
    assert not Speculation([]).is_on


def test_a_scaled_step_stops_drafts_for_a_number_of_steps_without_scaling() -> None:
    speculation = Speculation([0])
    speculation.end_step(scaled=True)
    for _ in range(PATIENCE - 1):
        speculation.end_step(scaled=False)
        assert not speculation.is_on
    speculation.end_step(scaled=True)
    for number in range(PATIENCE):
        assert not speculation.is_on, number
        speculation.end_step(scaled=False)
    assert speculation.is_on


def test_a_step_forgets_the_drafts_of_the_one_before() -> None:
    speculation = Speculation([0, 1])
    speculation.add(0)
    speculation.add(1)
    speculation.remove(1)
    assert speculation.drafted == {0}
    speculation.end_step(scaled=False)
    assert speculation.drafted == set()
