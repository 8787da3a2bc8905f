"""The clock of a step: which spans count, whatever their length."""

from __future__ import annotations

import torch

from infinity.observe.clock import Phase, StepClock


def test_a_backward_inside_a_forward_counts_as_forward() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.begin(Phase.FORWARD)
    clock.begin(Phase.BACKWARD)
    clock.end(Phase.BACKWARD)
    clock.end(Phase.FORWARD)
    seconds = clock.read()
    assert seconds[Phase.FORWARD] > 0 and seconds[Phase.BACKWARD] == seconds[Phase.STEP] == 0
    assert set(clock.read().values()) == {0.0}


def test_a_phase_without_an_end_does_not_count() -> None:
    """A backward that raised is dropped when the next forward begins; a phase that ends twice ends once."""
    clock = StepClock(torch.device("cpu"))
    clock.begin(Phase.BACKWARD)
    clock.begin(Phase.FORWARD)
    clock.end(Phase.BACKWARD)
    clock.end(Phase.FORWARD)
    once = clock.read()
    assert once[Phase.BACKWARD] == 0 and once[Phase.FORWARD] > 0
    clock.end(Phase.FORWARD)
    assert clock.read()[Phase.FORWARD] == 0
