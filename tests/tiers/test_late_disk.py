"""An engine whose disk is as late as a disk may be trains as on a prompt one.

Mutations that these tests were seen to catch (losses or parameters are NaN or differ):

- `UpdatePipeline._compute` without waiting for a tile's reads; `_finish_write` without waiting for its writes.
- `UpdateJob.after` left out: an update reads states that the one before is still writing (test_update.py).
- `UnitStore.release` without waiting for the unit's update: the next fetch reads former parameters.
- `GradStore._keep` without waiting for its write: the update reads former gradients.
- `GradStore._add_stored` without waiting for its read.
"""

from __future__ import annotations

import pytest

from support.configs import engine_config
from support.late_device import LateDevice
from support.late_disk import use_late_disks
from support.loops import assert_same, trained
from support.models import Linears, Stack, seeded, token_batches, vector_batches

TOKENS = token_batches(8)
PLACEMENTS = [("nvme", "none"), ("nvme", "cpu"), ("nvme", "nvme"), ("none", "nvme"), ("cpu", "nvme")]


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("param, optim", PLACEMENTS)
def test_trains_as_on_a_prompt_disk(
    monkeypatch: pytest.MonkeyPatch, param: str, optim: str, clip: float, accumulation: int, late: bool
) -> None:
    config = engine_config(param, optim, bf16=True, clip=clip, accumulation=accumulation, prefetch_bytes=20_000)
    expected = trained(seeded(Stack), TOKENS, config)
    use_late_disks(monkeypatch)
    assert_same(trained(seeded(Stack), TOKENS, config, LateDevice() if late else None), expected)


@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
def test_one_unit_of_several_tiles(monkeypatch: pytest.MonkeyPatch, update: str) -> None:
    """A model of one unit is updated again while its states may still be in flight to the disk."""
    batches = vector_batches(8, width=96)
    config = engine_config(unit_size="64MiB", update=update)
    make = lambda: Linears(96, depth=1)  # noqa: E731
    expected = trained(seeded(make), batches, config)
    assert expected.units == 1
    use_late_disks(monkeypatch)
    assert_same(trained(seeded(make), batches, config), expected)
