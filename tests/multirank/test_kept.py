"""Kept parameters and views, edits, the user's hooks and freezing on two ranks equal a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multirank import kept_cases
from support.beside import assert_like
from support.ranks import Group

STAGES = pytest.mark.parametrize("stage", [0, 2, 3])
SCHEDULES = pytest.mark.parametrize("update", ["during_backward", "next_forward", "after_backward"])


def assert_like_plain(
    pair: Group,
    story: str,
    stage: int,
    folder: Path,
    edit: str = "",
    twice: str = "",
    echoed: slice = slice(None),
    **options: Any,
) -> None:
    places = {} if stage == 3 else {"param": "none", "optim": "cpu"}
    model: dict[str, Any] = {"story": story, "edit": edit, "twice": twice, "echoed": echoed}
    found = pair.run(kept_cases.reported, folder=str(folder), stage=stage, **model, **places, **options)
    expected = kept_cases.plain(2, **model)
    assert_like([list(losses) for losses in zip(*(o["losses"] for o in found), strict=True)], expected["losses"])
    for outcome in found:
        if story != "views of one rank" or outcome is found[1]:
            assert_like(outcome["seen"], expected["seen"])
        assert_like(outcome["values"], expected["values"])


@STAGES
@SCHEDULES
@pytest.mark.parametrize("story", ["views", "views of one rank"])
def test_views_show_what_each_step_made(pair: Group, story: str, update: str, stage: int, tmp_path: Path) -> None:
    assert_like_plain(pair, story, stage, tmp_path, update=update)


@STAGES
@pytest.mark.parametrize("story", ["nothing", "edited views"])
@pytest.mark.parametrize("twice", ["all ranks", "one rank"])
def test_views_that_backward_reads_after_an_update(
    pair: Group, twice: str, story: str, stage: int, tmp_path: Path
) -> None:
    """Backward waits for the updates under way, so that one in the buffers of the views changes the result."""
    assert_like_plain(pair, story, stage, tmp_path, twice=twice, update="during_backward")


@pytest.mark.parametrize("story", ["nothing", "edited views"])
def test_views_that_backward_reads_with_late_copies(pair: Group, story: str, tmp_path: Path) -> None:
    assert_like_plain(pair, story, 3, tmp_path, twice="all ranks", late=True, update="during_backward")


@pytest.mark.parametrize("story", ["nothing", "views"])
@pytest.mark.parametrize("twice", ["all ranks", "one rank"])
def test_views_that_backward_reads_after_their_unit_is_fetched_again(
    pair: Group, twice: str, story: str, tmp_path: Path
) -> None:
    """The last layer is updated in host memory first, and fetched for the next forward before backward has ended."""
    options: dict[str, Any] = {"param": "cpu", "optim": "cpu", "prefetch_bytes": 32768, "late": True}
    echoed = slice(5, 6)
    assert_like_plain(pair, story, 3, tmp_path, twice=twice, echoed=echoed, update="during_backward", **options)


def test_edits_through_views_after_an_update_in_backward_are_refused(pair: Group, tmp_path: Path) -> None:
    for error in pair.run(kept_cases.edits_before_the_step, folder=str(tmp_path)):
        assert "layers.3 was edited while the unit was released" in error


@STAGES
@pytest.mark.parametrize("story", ["edited views", "edited views, later", "dropped views", "undone views"])
@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
def test_edits_through_views(pair: Group, story: str, update: str, stage: int, tmp_path: Path) -> None:
    assert_like_plain(pair, story, stage, tmp_path, update=update)


@STAGES
@SCHEDULES
def test_edits_through_kept_parameters(pair: Group, update: str, stage: int, tmp_path: Path) -> None:
    assert_like_plain(pair, "parameters", stage, tmp_path, update=update, leaks=False)


@STAGES
@pytest.mark.parametrize("edit", list(kept_cases.EDITS))
def test_edits_in_the_forward(pair: Group, edit: str, stage: int, tmp_path: Path) -> None:
    assert_like_plain(pair, "nothing", stage, tmp_path, edit=edit, leaks=False)


@STAGES
@SCHEDULES
def test_hooks_around_an_operation(pair: Group, update: str, stage: int, tmp_path: Path) -> None:
    assert_like_plain(pair, "nothing", stage, tmp_path, hooks=True, update=update)


@STAGES
@SCHEDULES
def test_freezing(pair: Group, update: str, stage: int, tmp_path: Path) -> None:
    assert_like_plain(pair, "freezing", stage, tmp_path, update=update, leaks=False)


@STAGES
@pytest.mark.parametrize("viewers", [[0, 1], [1]], ids=["of all ranks", "of one rank"])
def test_views_show_what_is_loaded(pair: Group, viewers: list[int], stage: int, tmp_path: Path) -> None:
    places = {} if stage == 3 else {"param": "none", "optim": "cpu"}
    assert all(pair.run(kept_cases.shown_after_a_load, folder=str(tmp_path), viewers=viewers, stage=stage, **places))
