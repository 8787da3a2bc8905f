"""The step's state machine: its phases, and the calls that are legal in each."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from infinity.errors import UsageError
from infinity.schedule.step import LEGAL, Call, Phase, Step


def backward(step: Step, *, updates: bool = False, counts: bool = True) -> None:
    step.begin_backward()
    if updates:
        step.add_updated([0])
    step.end_backward(counts=counts)


def idle() -> Step:
    return Step(2, early=False)


def accumulating() -> Step:
    step = Step(2, early=False)
    backward(step)
    return step


def collected() -> Step:
    step = accumulating()
    backward(step)
    return step


def updated() -> Step:
    step = Step(2, early=True)
    backward(step)
    backward(step, updates=True)
    return step


STEPS: dict[Phase, Callable[[], Step]] = {
    Phase.IDLE: idle,
    Phase.ACCUMULATING: accumulating,
    Phase.COLLECTED: collected,
    Phase.UPDATED: updated,
}


@pytest.mark.parametrize(("phase", "call"), list(product(Phase, Call)))
def test_a_call_is_legal_or_refused_with_a_fix(phase: Phase, call: Call) -> None:
    step = STEPS[phase]()
    assert step.phase is phase
    before = (step.micro_steps, set(step.updated), step.is_complete)
    if call in LEGAL[phase]:
        step.check(call, "the call")
    else:
        with pytest.raises(UsageError, match=r"engine\.(step|backward|drop_gradients)\("):
            step.check(call, "the call")
    assert (step.micro_steps, set(step.updated), step.is_complete) == before, "a check changes nothing"


@pytest.mark.parametrize("call", [Call.STEP, Call.OPTIMIZER_STEP])
def test_no_step_in_a_no_sync_block(call: Call) -> None:
    step = collected()
    with step.no_sync(), step.no_sync(), pytest.raises(UsageError, match="no_sync"):
        step.check(call)
    step.check(call)


def test_the_last_micro_batch_is_known_when_its_backward_begins() -> None:
    step = Step(3, early=False)
    seen = []
    for _ in range(4):
        step.begin_backward()
        seen.append(step.is_last_micro_step)
        step.end_backward(counts=True)
    assert seen == [False, False, True, True]
    with step.no_sync():
        step.begin_backward()
        assert not step.is_last_micro_step


def test_a_backward_without_gradients_does_not_count() -> None:
    step = Step(1, early=False)
    backward(step, counts=False)
    assert step.phase is Phase.IDLE and not step.is_complete


def test_a_backward_after_the_last_is_refused_if_backward_updates() -> None:
    early, late = Step(1, early=True), Step(1, early=False)
    for step in (early, late):
        backward(step)
    late.check(Call.BACKWARD)
    with pytest.raises(UsageError, match=r"more than gradient_accumulation_steps times \(1\)"):
        early.check(Call.BACKWARD)


def test_a_step_that_ended_is_idle() -> None:
    step = updated()
    step.end()
    assert step.phase is Phase.IDLE and not step.is_complete and step.unscaled == 0
