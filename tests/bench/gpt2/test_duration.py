"""The number of steps that a job chooses: fits in its time, within bounds, and says why."""

import time

import pytest
from hypothesis import given, strategies as st

from gpt2.duration import (
    JOB_SECONDS,
    MAX_PASSES,
    MEASURED_STEPS,
    MIN_STEPS,
    SKIPPED_STEPS,
    Costs,
    choose_steps,
    max_steps,
    process_seconds,
    show_choice,
    step_seconds,
)

DONE = MEASURED_STEPS
SECONDS = st.floats(0, 1e4)


@given(elapsed=SECONDS, step=SECONDS, closing=SECONDS, most=st.integers(MIN_STEPS, 10**6))
def test_choice_is_the_largest_number_that_fits_within_the_bounds(
    elapsed: float, step: float, closing: float, most: int
) -> None:
    costs = Costs(elapsed, step, closing)
    steps = choose_steps(costs, done=DONE, most=most)

    def end(steps: int) -> float:
        return elapsed + (steps - DONE) * step + closing

    assert MIN_STEPS <= steps <= most
    assert steps == MIN_STEPS or end(steps) <= JOB_SECONDS + 1e-6
    assert steps == most or end(steps + 1) > JOB_SECONDS - 1e-6


def test_choice_of_slow_machine_is_lower_and_ends_at_the_same_time() -> None:
    fast, slow = Costs(12.0, 0.2, 8.0), Costs(30.0, 0.5, 20.0)
    assert choose_steps(fast, done=25, most=10**6) == 25 + 650
    assert choose_steps(slow, done=25, most=10**6) == 25 + 200


@pytest.mark.parametrize("elapsed", [0.0, JOB_SECONDS, 10 * JOB_SECONDS])
def test_choice_is_the_minimum_if_steps_take_long(elapsed: float) -> None:
    assert choose_steps(Costs(elapsed, 60.0, 1.0), done=DONE, most=10**6) == MIN_STEPS


def test_choice_is_the_maximum_if_steps_take_no_time() -> None:
    assert choose_steps(Costs(1.0, 0.0, 1.0), done=DONE, most=777) == 777


def test_measured_steps_leave_some_after_them_and_skip_some_before() -> None:
    assert SKIPPED_STEPS < MEASURED_STEPS < MIN_STEPS


def test_maximum_is_a_few_passes_over_the_text_but_not_below_the_minimum() -> None:
    assert max_steps(1_000_000, 1000) == MAX_PASSES * 1000
    assert max_steps(10, 1000) == MIN_STEPS


def test_step_seconds_are_the_mean_without_the_first_steps() -> None:
    assert step_seconds([100.0] * SKIPPED_STEPS + [1.0, 1.0, 4.0]) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        (225, "steps: 225; at 0.500 s each the job ends after about 2:30 (--train-iters overrides)"),
        (50, "steps: 50, the minimum; at 0.500 s each the job ends after about 1:02 (--train-iters overrides)"),
        (
            1000,
            "steps: 1,000, 4 passes over the text; at 0.500 s each the job ends after about 8:58 "
            "(--train-iters overrides)",
        ),
    ],
)
def test_line_states_number_reason_and_flag(steps: int, line: str) -> None:
    assert show_choice(steps, Costs(30.0, 0.5, 20.0), done=25, most=1000) == line


def test_process_seconds_grow_and_started_before_this_test() -> None:
    first = process_seconds()
    assert 0 < first <= process_seconds() <= time.clock_gettime(time.CLOCK_BOOTTIME)
