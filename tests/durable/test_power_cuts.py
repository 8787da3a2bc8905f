"""Power cuts: every write of a run is recorded, and the files are rebuilt as the drives of its ranks may leave them.

At a power cut, a file holds what was written before its last sync, and any of the writes since. One of them may be torn
at a sector. All ranks must find one commit, with all its bytes: the last that was agreed on, or a later one. Each rank
has a drive of its own, and the power fails on all at once or on each at a moment of its own.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from durable import power_cases
from durable.cuts import Counts, are_possible, files_at, moments, replay
from durable.drive import Files
from durable.power_cases import NVME, Trained
from durable.recorder import STATES, End, Enter, Leave, Log, Sync
from infinity.durable.folder import generation_folder, read_generations
from infinity.tiers.open_tiers import states_of
from support.ranks import Group

CASES: dict[str, dict[str, Any]] = {
    "during backward": {},
    "drafts": {"clip": 100.0},
    "next forward": {"clip": 0.5, "update": "next_forward"},
    "in host memory": {"param": "cpu", "optim": "cpu", "clip": 0.5},
    "bf16, 8 bit": {"bf16": True, "moments": "8bit"},
}
Undisturbed = Callable[[int], tuple[list[Log], list[Trained]]]
RANKS = pytest.mark.parametrize("ranks", [1, 2])
OPTIONS = pytest.mark.parametrize("options", CASES.values(), ids=CASES)
ENDS = (End(2, (0,), after_write=False), End(4, (1,), after_write=True))
"""Ends of processes in a commit that one of two ranks has recorded."""


def trained(
    group: Group, folder: Path, steps: int, *, ends: Sequence[End] = (), **options: Any
) -> tuple[list[Log], list[Trained]]:
    """Train a durable run. Returns what each rank wrote, and how it trains without interruption."""
    found = group.run(power_cases.interrupted, timeout=300, folder=str(folder), steps=steps, ends=list(ends), **options)
    return [log for log, _ in found], [expected for _, expected in found]


@pytest.fixture(scope="module")
def undisturbed(groups: dict[int, Group], tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Number of ranks → `trained` for five steps without options."""

    @cache
    def of(ranks: int) -> tuple[list[Log], list[Trained]]:
        return trained(groups[ranks], tmp_path_factory.mktemp("undisturbed"), 5)

    return of


def cut(logs: Sequence[Log], folder: Path, *, seeded: int, seed: int) -> Counts:
    (folder / "records").mkdir(exist_ok=True)
    return replay(logs, folder / "records", seeded=seeded, seed=seed)


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        pytest.param(ranks, case, marks=[] if (ranks == 2) == (number in (0, 1)) else [pytest.mark.slow])
        for number, case in enumerate(CASES)
        for ranks in (1, 2)
    ],
)
def test_a_power_cut_leaves_the_last_commit_whole(
    groups: dict[int, Group], tmp_path: Path, ranks: int, case: str
) -> None:
    logs, _ = trained(groups[ranks], tmp_path, 5, **CASES[case])
    counts = cut(logs, tmp_path, seeded=4, seed=1)
    assert counts.cuts > 100 * ranks and counts.at_once > 30 * ranks
    assert {*counts.steps} <= {0, 1}
    assert all(read_generations(tmp_path / f"node-{rank}" / NVME / "run") for rank in range(ranks))


def test_after_processes_that_ended_in_a_commit(groups: dict[int, Group], tmp_path: Path) -> None:
    """A rank that has recorded a commit which the other has not withdraws it, before its slots are written again."""
    logs, _ = trained(groups[2], tmp_path, 6, ends=ENDS)
    assert cut(logs, tmp_path, seeded=4, seed=1).moments > 300


@pytest.mark.campaign(few=1)
@pytest.mark.parametrize("seed", [1, 2])
@RANKS
@OPTIONS
def test_power_cuts_in_twenty_steps_leave_the_last_commit_whole(
    groups: dict[int, Group], tmp_path: Path, ranks: int, options: dict[str, Any], seed: int
) -> None:
    logs, _ = trained(groups[ranks], tmp_path, 20, **options)
    counts = cut(logs, tmp_path, seeded=1000 // ranks, seed=seed)
    print(f"seed {seed}: {counts}")


@RANKS
def test_training_goes_on_bit_identical(
    groups: dict[int, Group], undisturbed: Undisturbed, tmp_path: Path, ranks: int
) -> None:
    """Real starts from drawn cuts, of moments that are possible together."""
    steps, draw = 5, random.Random(3)
    (tmp_path / "records").mkdir()
    logs, expected = undisturbed(ranks)
    of_ranks = [moments(log, tmp_path / "records", 1, draw) for log in logs]
    starts = set()
    for number in range(4):
        while not are_possible(chosen := [draw.choice(own) for own in of_ranks]):
            pass
        folder = tmp_path / f"cut-{number}"
        for log, moment in zip(logs, chosen, strict=True):
            restore(log, files_at(log, moment.position, tmp_path / "records", draw), folder)
        found = groups[ranks].run(power_cases.resumed, folder=str(folder), steps=steps)
        for own, whole in zip(found, expected, strict=True):
            assert own.losses == whole.losses[own.start :]
            assert all(torch.equal(value, whole.values[name]) for name, value in own.values.items())
        starts |= {own.start for own in found}
        shutil.rmtree(folder)
    assert len(starts) > 1


def restore(log: Log, files: Files, folder: Path) -> None:
    """Write the files of a rank to its drive."""
    target = generation_folder(folder / f"node-{log.rank}" / NVME / "run", 1)
    target.mkdir(parents=True, mode=0o700)
    target.parent.chmod(0o700)
    for name, content in {**files, **log.files}.items():
        path = target / (states_of(log.rank) if name == STATES else name)
        path.write_bytes(content)
        path.chmod(0o600)


# -- the replay finds what would be wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_record_that_is_written_before_its_states_is_found(
    undisturbed: Undisturbed, tmp_path: Path, ranks: int
) -> None:
    """Without the sync of states before the record, a power cut leaves a record of other bytes."""
    logs, _ = undisturbed(ranks)
    unsynced = [replace(log, events=[e for e in log.events if e != Sync(STATES)], order=None) for log in logs]
    with pytest.raises(AssertionError, match=r"is not whole|is lost"):
        cut(unsynced, tmp_path, seeded=20, seed=1)


def test_ranks_that_go_on_without_an_agreement_are_found(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """If a commit did not wait for the record of every rank, a rank could be two commits ahead of another."""
    logs, _ = undisturbed(2)
    apart = [
        replace(
            log, order=None, events=[e for e in log.events if not (isinstance(e, Enter | Leave) and e.kind == "commit")]
        )
        for log in logs
    ]
    with pytest.raises(AssertionError):
        cut(apart, tmp_path, seeded=4, seed=1)
