"""The condition of a durable run's folder: its last commit, missing or damaged files, and the command that resumes it.

Folders that others may write are refused, since the command in them is executed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infinity.checkpoint.rank_states import file_sizes
from infinity.durable import folder as files
from infinity.durable.manifest import Manifest
from infinity.durable.record import Record, read_record
from infinity.durable.source import states_of
from infinity.errors import CheckpointError
from infinity.tiers.open_tiers import states_in


@dataclass(frozen=True)
class Condition:
    """The last commit of a run, as far as this machine has its files."""

    run: str
    """Name of the run."""
    step: int | None
    """The last committed step; None: nothing is committed."""
    ranks: int
    absent: tuple[int, ...]
    """Ranks whose files are not on this machine."""
    faults: tuple[str, ...]
    """Files that are damaged, missing, or of another commit, with the reason."""
    proves: bool
    """False if records are of a version that has no digests of the states."""
    command: tuple[str, ...]
    """The command line of the process that made the last commit."""
    folder: str
    """Its working directory."""
    written_in: str
    """Path of the run's folder when it was trained, which the command trains again; empty if it is not recorded."""

    @property
    def is_intact(self) -> bool:
        """Return whether every rank can resume from the commit."""
        return self.step is not None and not self.absent and not self.faults


@contextmanager
def owned(run: Path) -> Iterator[Path]:
    """Yield a path of the folder `run` that stays valid if the folder is renamed or replaced.

    Raises CheckpointError if it is no durable run, or if another user could have written the command in it.
    """
    try:
        fd = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{run} cannot be opened: {error.strerror}; pass the folder NVME_PATH/RUN") from error
    held = Path(f"/proc/self/fd/{fd}")
    try:
        if not files.is_run(held):
            if any(held.glob("[0-9]*/rank-*")):
                raise CheckpointError(
                    f"{run} has files of a run, but no manifest (rank-*.json). If it was lost, restore it from a copy. "
                    "Otherwise pass NVME_PATH/RUN in the first folder of nvme_path."
                )
            raise CheckpointError(f"{run} is not the folder of a durable run: pass NVME_PATH/RUN (infinity.run)")
        _check_owner(os.fstat(fd), run)
        for path in (*held.glob("[0-9]*"), *held.glob("[0-9]*/rank-*.json")):
            _check_owner(os.lstat(path), run / path.relative_to(held))
        yield held
    except CheckpointError as error:
        raise CheckpointError(_named(error, held, run)) from error
    finally:
        os.close(fd)


def condition(held: Path, run: Path, *, verify: bool) -> Condition:
    """Return the condition of a run. held: the folder, as `owned` yields it. run: its name for messages. verify: read
    the states and compare them with their records.

    Raises CheckpointError if no manifest can be read.
    """
    for lost in files.without_manifest([held]):
        raise CheckpointError(
            f"all manifests in {run / lost.name} are missing or damaged: restore them from a copy, or load a "
            "checkpoint in another run (infinity.run)"
        )
    generations = files.read_generations(held)
    found = [(each, number) for each in generations if (number := _last_commit(each)) or each.damaged]
    generation, number = found[-1] if found else (generations[-1], 0)
    manifest = generation.manifests[min(generation.manifests)]
    folder = files.generation_folder(held, generation.number)
    there = set(files.ranks_in(folder))
    records = {rank: read_record(files.record_file(folder, rank, number)) for rank in generation.manifests if number}
    steps = [each.progress.global_steps for each in records.values() if each is not None and each.number == number]
    faults = []
    for rank in range(manifest.ranks):
        if rank in there and rank not in generation.manifests:
            faults.append(f"rank {rank}: its manifest is damaged")
        elif rank in records:
            own, record = generation.manifests[rank], records[rank]
            own_faults = [*_faults(held, run, own, generation.number, rank, number, record)]
            if verify and record is not None and not own_faults:
                own_faults = [*_differences(held, run, own, generation.number, rank, record)]
            faults += [f"rank {rank}: {fault}" for fault in own_faults]
        elif rank in generation.damaged:
            faults.append(f"rank {rank}: its records are damaged or missing")
    if len({job for (_, own), job in generation.jobs.items() if own == number}) > 1:
        faults.append("different jobs wrote the records of the ranks: copy the files of one run")
    absent = tuple(rank for rank in range(manifest.ranks) if rank not in there)
    return Condition(
        run=run.name,
        step=steps[-1] if steps else None,
        ranks=manifest.ranks,
        absent=absent,
        faults=tuple(faults),
        proves=all(each is None or each.digests is not None for each in records.values()),
        command=manifest.command,
        folder=manifest.folder,
        written_in=next(iter(manifest.runs), ""),
    )


def _last_commit(generation: files.Generation) -> int:
    """Return the number of the newest commit that every rank of this machine has reached; 0: none.

    A rank without a record has lost it, unless all are at the first commit, which it has not reached.
    """
    newest = [max(numbers, default=0) for numbers in generation.commits.values()]
    if max(newest, default=0) < 2 and not generation.damaged:
        return min(newest, default=0)
    return min((number for number in newest if number), default=0)


def _faults(
    held: Path, run: Path, manifest: Manifest, generation: int, rank: int, number: int, record: Record | None
) -> Iterator[str]:
    """Yield the faults of a rank's files of a commit. run: name of the folder `held`. record: of the file that should
    hold it.
    """
    if record is None or record.number != number:
        yield f"its record of commit {number} is missing or damaged"
    elif len(record.slots) != len(manifest.layout["extents"]):
        yield f"its record of commit {number} is of another layout"
    others = list(map(Path, manifest.runs[1:]))
    shown, present = (
        states_in([files.generation_folder(each, generation) for each in (first, *others)], rank)
        for first in (run, held)
    )
    for name, path, nbytes in zip(shown, present, file_sizes(manifest.layout), strict=True):
        try:
            status = os.lstat(path)
        except OSError as error:
            yield f"{name}: {error.strerror}"
            continue
        if not stat.S_ISREG(status.st_mode) or status.st_size < nbytes:
            yield f"{name} has {status.st_size:,} bytes instead of {nbytes:,}"


def _differences(
    held: Path, run: Path, manifest: Manifest, generation: int, rank: int, record: Record
) -> Iterator[str]:
    """Read a rank's states, and yield how they differ from the record of their commit. run: name of `held`."""
    folders = [files.generation_folder(run, generation) for run in [held, *map(Path, manifest.runs[1:])]]
    try:
        wrong = states_of(folders, rank, manifest, record).wrong()
    except CheckpointError as error:
        yield _named(error, held, run)
        return
    if wrong:
        yield (
            f"the {wrong} are not those of commit {record.number}: the files were copied while the run trained, or "
            "altered since. Copy them again while no process trains the run, or load a checkpoint"
        )


def _named(error: CheckpointError, held: Path, run: Path) -> str:
    """Return the text of an error with the name of the folder `held`."""
    return str(error).replace(f"{held}/", f"{run}/")


def _check_owner(status: os.stat_result, path: Path) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise CheckpointError(
            f"{path} is a link, which Infinity never creates in a run, so nothing was executed: remove it"
        )
    if status.st_uid != os.geteuid():
        raise CheckpointError(
            f"{path} belongs to another user, so its command was not executed: resume the run as that user"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CheckpointError(
            f"other users may write {path} and thus change the command: check the command in its manifests "
            "(rank-*.json), then run chmod go-w on it"
        )
