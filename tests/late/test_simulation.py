"""A simulated step is the same in each run, adds up, and follows the stated speeds. Each runs in a process of its own,
where virtual time never ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "simulate_step.py"
LAYERS = 3
SHAPE = [f"--num-layers={LAYERS}", "--steps=3", "--hidden-size=512", "--num-attention-heads=8", "--seq-length=128",
         "--vocab-size=1024", "--batch=4"]  # fmt: skip
SLOW_LINK = ("to_device=2e8", "from_device=2e8", "half=2e12", "memory=1e9")


def run(update: str, *changes: str, device_memory: str = "") -> dict[str, Any]:
    sets = [f"--set={change}" for change in changes]
    command = [sys.executable, str(SCRIPT), *SHAPE, *sets, "--only", "h200", update, "2MB", device_memory]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@lru_cache
def known(update: str, *changes: str, device_memory: str = "") -> dict[str, Any]:
    return run(update, *changes, device_memory=device_memory)


@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
def test_a_second_run_has_the_same_times(update: str) -> None:
    assert run(update, *SLOW_LINK) == known(update, *SLOW_LINK)


@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
def test_busy_and_exposed_times_add_up_to_the_step(update: str) -> None:
    result = known(update, *SLOW_LINK)
    for step, seconds in zip(result["steps"], result["seconds"], strict=True):
        phases = step.values()
        assert sum(sum(phase.values()) for phase in phases) == pytest.approx(seconds, rel=1e-9)
        assert all(part >= 0 for phase in phases for part in phase.values())
        assert sum(phase["busy"] for phase in phases) > 0
    assert sum(result["sites"].values()) == pytest.approx(seconds - sum(phase["busy"] for phase in phases), rel=1e-9)


@pytest.mark.parametrize(
    "change, lane",
    [("to_device=4e8", "host to device"), ("from_device=4e8", "device to host"), ("memory=2e9", "update")],
)
def test_a_faster_lane_is_exposed_less_and_the_step_not_longer(change: str, lane: str) -> None:
    slow, fast = known("next_forward", *SLOW_LINK), known("next_forward", *SLOW_LINK, change)
    assert exposed(slow, lane) > 0
    assert exposed(fast, lane) < exposed(slow, lane)
    assert sum(fast["seconds"]) < sum(slow["seconds"])


@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
def test_states_on_the_device_shorten_the_step(update: str) -> None:
    """The first units, which the next forward waits for, are updated on the device."""
    without, some = known(update, *SLOW_LINK), known(update, *SLOW_LINK, device_memory="64MB")
    assert some["held"]["host"] < without["held"]["host"]
    assert without["held"]["device"] < some["held"]["device"] <= 32 << 20
    assert exposed_in_forward(some, "update") < exposed_in_forward(without, "update")
    assert sum(some["seconds"]) < sum(without["seconds"])


def test_gradients_take_no_core_of_the_host() -> None:
    """Adam has the cores. The device sums the squares of gradients that the host does not add."""
    shared, alone = known("during_backward", "memory=2e9"), known("during_backward", "memory=2e9", "core=1e8")
    assert alone["seconds"] == shared["seconds"]


def exposed(result: dict[str, Any], lane: str) -> float:
    return sum(phase[lane] for step in result["steps"] for phase in step.values())


def exposed_in_forward(result: dict[str, Any], lane: str) -> float:
    return sum(step["forward"][lane] for step in result["steps"])


def test_matrix_products_take_their_operations() -> None:
    """At a low rate of products they are the whole step. A checkpoint does not recompute a block's last product."""
    tokens, width, length, vocabulary = 4 * 128, 512, 128, 1024
    forward, backward, recomputed = 24, 48, 16
    block = (forward + backward + recomputed) * tokens * width**2
    attention = (4 + 10 + 4) * tokens * length * width
    operations = LAYERS * (block + attention) + 6 * tokens * width * vocabulary
    [step, *_] = known("during_backward", "half=1e9")["steps"]
    assert sum(phase["busy"] for phase in step.values()) == pytest.approx(operations / 1e9, rel=1e-3)
