"""The commit that a run goes on from: the last one that all ranks of a generation have, if its files are of one run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.comm.communicator import Communicator
from infinity.durable import folder as files
from infinity.durable.manifest import Manifest
from infinity.durable.record import Record
from infinity.errors import CheckpointError


@dataclass(frozen=True)
class Source:
    """The last commit that all ranks of a generation have."""

    generation: int
    number: int
    ranks: int


@dataclass(frozen=True)
class Seen:
    """A generation as one rank sees it.

    ranks: of its run. commits: rank → numbers of its intact records. is_same: True if the layout of this rank's states
    is the present one. damaged: ranks that have committed and have no intact record. jobs: rank and number of a record
    → the job that wrote it.
    """

    ranks: int
    commits: Mapping[int, tuple[int, ...]]
    is_same: bool
    damaged: tuple[int, ...] = ()
    jobs: Mapping[tuple[int, int], str] = field(default_factory=dict)


def choose(ranks: int, seen: Sequence[Mapping[int, Seen]], run: Path) -> tuple[Source | None, bool]:
    """Return the last commit of the newest generation that has one, and whether all ranks have its layout.

    seen: for each present rank, generation → what it sees of it. run: for messages. Pure; all ranks get the same
    answer. Raises CheckpointError if a generation has commits of some of its ranks, and none that all have.
    """
    for generation in sorted({number for each in seen for number in each}, reverse=True):
        views = [each[generation] for each in seen if generation in each]
        before = max(view.ranks for view in views)
        commits: dict[int, set[int]] = {}
        for view in views:
            for rank, numbers in view.commits.items():
                commits.setdefault(rank, set()).update(numbers)
        common = set.intersection(*(commits.get(rank, set()) for rank in range(before)))
        if number := max(common, default=0):
            check_jobs({job for view in views for (_, own), job in view.jobs.items() if own == number}, run)
            is_same = before == ranks and len(views) == len(seen) and all(view.is_same for view in views)
            return Source(generation, number, before), is_same
        _check_begun(before, commits, {rank for view in views for rank in view.damaged}, run)
    return None, False


def check_jobs(jobs: Collection[str], run: Path) -> None:
    """Raise CheckpointError if ranks have records of one step from different starts of a run. jobs: of all ranks."""
    if len(jobs) > 1:
        raise CheckpointError(
            f"{run} has files of different runs, since different jobs wrote the records of its ranks: copy the files "
            "of one run to it while no process trains that run"
        )


def check_layout(record: Record, manifest: Manifest, folder: Path) -> None:
    """Raise CheckpointError if a rank's record belongs to another manifest."""
    if record.proof.layout not in ("", digest(manifest.layout)):
        raise CheckpointError(
            f"{folder} has files of different runs, since the manifest and the record of a rank name different "
            "layouts: copy the files of one run to it while no process trains that run"
        )


def _check_begun(ranks: int, commits: Mapping[int, set[int]], damaged: set[int], run: Path) -> None:
    """Raise CheckpointError if all ranks of a generation have committed, and files of some are missing or damaged."""
    missing = [rank for rank in range(ranks) if rank not in commits]
    newest = max((max(numbers, default=0) for numbers in commits.values()), default=0)
    if damaged:
        problem = f"the records of rank {', '.join(map(str, sorted(damaged)))} are damaged or missing"
    elif newest and missing:
        problem = f"the files of rank {', '.join(map(str, missing))} are missing, or their manifests are damaged"
    elif newest > 1:
        problem = "its ranks have records of different steps"
    else:
        return
    raise CheckpointError(
        f"{run} holds a run that cannot be resumed: {problem}. Restore the files of all ranks, or name another run "
        "(infinity.run) and load a checkpoint. To begin anew, remove the folder."
    )


def last_source(ranks: Communicator, run: Path) -> Source | None:
    """Return the last commit of a run that this process does not hold. Collective."""
    return choose(0, ranks.gather(seen_by(run)), run)[0]


def digest(layout: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()


def seen_by(run: Path, rank: int = 0, manifest: Manifest | None = None) -> dict[int, Seen]:
    """Return generation → what this rank sees of it. manifest: its present one; None if it does not hold the run."""
    found = {}
    for each in files.read_generations(run):
        own = each.manifests.get(rank)
        is_same = own is not None and manifest is not None and digest(own.layout) == digest(manifest.layout)
        ranks = max(one.ranks for one in each.manifests.values())
        found[each.number] = Seen(ranks, each.commits, is_same, each.damaged, each.jobs)
    return found
