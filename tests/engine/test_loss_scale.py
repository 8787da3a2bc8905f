"""The loss scale: when it is doubled, when it is halved, and when training stops."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from infinity.config import Config
from infinity.engine.optimizer.loss_scale import LossScale
from infinity.errors import NonFiniteError


def scales(steps: str, **options: Any) -> list[float]:
    """Return the scale after each step: "+" passed, "-" overflowed."""
    scale = LossScale.of(Config.load({"fp16": {"enabled": True, **options}}))
    found = []
    for step in steps:
        scale.passed() if step == "+" else scale.overflowed()
        found.append(scale.value)
    return found


def test_a_window_without_overflow_doubles_it() -> None:
    assert scales("+++++++", initial_scale_power=3, loss_scale_window=3) == [8, 8, 16, 16, 16, 32, 32]
    assert scales("++-+++", initial_scale_power=3, loss_scale_window=3) == [8, 8, 8, 8, 8, 16]


def test_overflows_halve_it() -> None:
    assert scales("---", initial_scale_power=3, hysteresis=1) == [4, 2, 1]
    # The first is endured; those after it are not, until the scale has been doubled.
    assert scales("----+-", initial_scale_power=5) == [32, 16, 8, 4, 4, 2]
    assert scales("--++--", initial_scale_power=5, loss_scale_window=2) == [32, 16, 16, 32, 32, 16]
    assert scales("--+--", initial_scale_power=5, consecutive_hysteresis=True) == [32, 16, 16, 16, 8]
    assert scales("---", initial_scale_power=3, hysteresis=1, min_loss_scale=3) == [4, 3, 3]


def test_a_fixed_one_stays() -> None:
    assert scales("+-" * 5, loss_scale=512) == [512] * 10


def test_off_it_is_1() -> None:
    assert LossScale.of(Config()).value == 1.0


@pytest.mark.parametrize("options", [{"loss_scale": 8}, {"initial_scale_power": 0}])
def test_it_gives_up_where_it_cannot_become_smaller(options: dict[str, Any]) -> None:
    assert scales("-" * 19 + "+" + "-" * 19, **options)[-1] == options.get("loss_scale", 1)
    with pytest.raises(NonFiniteError, match="20 steps in a row"):
        scales("-" * 20, **options)


@given(
    st.text("+-", max_size=60),
    st.integers(0, 12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 60),
)
def test_it_stays_in_its_bounds_and_goes_on_from_where_it_stood(
    steps: str, power: int, window: int, hysteresis: int, consecutive: bool, saved_after: int
) -> None:
    fp16 = {
        "enabled": True,
        "initial_scale_power": power,
        "loss_scale_window": window,
        "hysteresis": hysteresis,
        "consecutive_hysteresis": consecutive,
    }
    config = Config.load({"fp16": fp16})
    scale = LossScale.of(config)
    for number, step in enumerate(steps):
        if number == saved_after:
            again = LossScale.of(config)
            again.load_state_dict(scale.state_dict())
            assert again == scale
            scale = again
        before = scale.value
        try:
            scale.passed() if step == "+" else scale.overflowed()
        except NonFiniteError:
            assert scale.value == scale.least and steps[: number + 1].endswith("-" * 20)
            return
        assert scale.value >= 1 and 1 <= scale.tolerance <= hysteresis
        assert scale.value >= before if step == "+" else scale.value <= before
