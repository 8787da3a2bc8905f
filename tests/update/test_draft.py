"""A draft is kept if `engine.step()` says so and it was made, whenever it hears of it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from infinity.plan.placement import Extent
from infinity.tier_kind import TierKind
from infinity.update.draft import Ceiling, Draft

PLACES = [Extent(TierKind.NVME, number << 16, 1 << 16, f"states {number}") for number in range(2)]


class Recorder:
    """A tier that records drafts. spares: number of extents that have a free spare slot."""

    def __init__(self, spares: int = 2) -> None:
        self.spares = spares
        self.open: list[Extent] = []
        self.ended: list[tuple[Extent, bool]] = []

    def begin_draft(self, extent: Extent) -> bool:
        if len(self.open) == self.spares:
            return False
        self.open.append(extent)
        return True

    def end_draft(self, extent: Extent, *, keep: bool) -> None:
        self.open.remove(extent)
        self.ended.append((extent, keep))


def made(draft: Draft, tier: Any, steps: list[int], when: int, keep: bool, *, squares: float = 1.0) -> bool:
    """Run the thread of updates, and decide before its event number `when`. Returns what `decide` does."""
    found: list[bool] = []

    def decide(number: int) -> None:
        if number == when:
            found.append(draft.decide(keep=keep))

    decide(0)
    if draft.open([(tier, extent) for extent in PLACES]):
        decide(1)
        if draft.proceed(squares):
            decide(2)
            steps[:] = [step + 1 for step in steps]
        else:
            decide(2)
    else:
        decide(1)
        decide(2)
    draft.end(failed=False)
    decide(3)
    assert not tier.open, "a draft is open after it was decided and made"
    return found[0]


@pytest.mark.parametrize("when", range(4))
def test_a_draft_is_kept_or_taken_back_whenever_it_is_decided(when: int) -> None:
    for keep in (True, False):
        tier, steps = Recorder(), [3, 4]
        assert made(Draft(steps, Ceiling(10.0)), tier, steps, when, keep) is keep
        assert steps == ([4, 5] if keep else [3, 4])
        final_from_the_start = when == 0
        assert tier.ended == ([] if final_from_the_start else [(extent, keep) for extent in PLACES])


@pytest.mark.parametrize(("when", "squares"), [*itertools.product((2, 3), (11.0, math.inf, math.nan))])
def test_a_draft_whose_gradient_exceeds_the_ceiling_is_not_made(when: int, squares: float) -> None:
    tier, steps = Recorder(), [3]
    assert made(Draft(steps, Ceiling(10.0)), tier, steps, when, True, squares=squares) is False
    assert steps == [3] and tier.ended == [(extent, False) for extent in PLACES]


def test_a_final_update_is_made_whatever_its_gradient() -> None:
    """The norm is known, so nothing has to be guessed from the squares."""
    for when in (0, 1):
        tier, steps = Recorder(), [3]
        assert made(Draft(steps, Ceiling(10.0)), tier, steps, when, True, squares=11.0) is True
        assert steps == [4]


def test_the_ceiling_counts_the_drafts_before() -> None:
    ceiling = Ceiling(10.0)
    for number, squares in enumerate((6.0, 3.0, 2.0)):
        tier, steps = Recorder(), [0]
        assert made(Draft(steps, ceiling), tier, steps, 3, True, squares=squares) is (number < 2)
    tier, steps = Recorder(), [0]
    draft = Draft(steps, ceiling)
    assert ceiling.is_exceeded and not draft.open([(tier, extent) for extent in PLACES])  # type: ignore[list-item,misc]
    draft.end(failed=False)
    assert not tier.ended and draft.decide(keep=True) is False


def test_a_draft_without_a_free_slot_is_not_made() -> None:
    """The slots that were taken before are given back."""
    tier, steps = Recorder(spares=1), [3]
    assert made(Draft(steps, Ceiling(10.0)), tier, steps, 3, True) is False
    assert steps == [3] and tier.ended == [(PLACES[0], False)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_draft_is_taken_back(when: str) -> None:
    tier, steps = Recorder(), [3]
    draft = Draft(steps, Ceiling(10.0))
    assert draft.open([(tier, extent) for extent in PLACES]) and draft.proceed(1.0)  # type: ignore[list-item,misc]
    steps[0] += 1
    if when == "before":
        draft.decide(keep=True)
    draft.end(failed=True)
    if when == "after":
        draft.decide(keep=True)
    assert steps == [3] and tier.ended == [(extent, False) for extent in PLACES]
