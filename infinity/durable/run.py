"""A durable run that this process holds as one rank: the generation that it writes, and the commit that it resumes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.comm.communicator import Communicator
from infinity.durable import folder as files
from infinity.durable.manifest import Manifest, manifest_of
from infinity.durable.record import CHECKSUMS, Record, confirm, invalidate, read_record, write_record
from infinity.errors import CheckpointError, StorageError, UsageError
from infinity.plan.plan import Plan
from infinity.tiers.durable import DurableFiles
from infinity.tiers.files import check_folder

if TYPE_CHECKING:
    from infinity.config import Config


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
    is the present one. damaged: ranks that have committed and have no intact record.
    """

    ranks: int
    commits: Mapping[int, tuple[int, ...]]
    is_same: bool
    damaged: tuple[int, ...] = ()


class DurableRun:
    """Opened by `open_run`. Its folder is locked until `close`."""

    def __init__(
        self,
        runs: Sequence[Path],
        rank: int,
        generation: int,
        source: Source | None,
        record: Record | None,
        lock: files.Lock,
        manifest: Manifest | None = None,
    ) -> None:
        """runs: the run's folder in each folder of nvme_path. record: of the commit whose slots the files hold.

        manifest: replaces that of the generation with the first commit; None: the generation has it already.
        """
        self.runs = list(runs)
        self.rank = rank
        self.generation = generation
        self.source = source
        """The commit to resume from; None: nothing is committed."""
        self.record = record
        """This rank's record of the last commit of `generation`; None: it has none."""
        self.is_loaded = False
        """True if the source has been loaded, so that the next commit may follow it."""
        self._lock = lock
        self._manifest = manifest

    @property
    def path(self) -> Path:
        return self.runs[0]

    @property
    def folders(self) -> list[Path]:
        """Folders of the files of states."""
        return [files.generation_folder(run, self.generation) for run in self.runs]

    @property
    def files(self) -> DurableFiles:
        if self.record is None:
            return DurableFiles(self.folders, None, b"")
        return DurableFiles(self.folders, self.record.slots, self.record.blobs.get(CHECKSUMS, b""))

    def holds(self, folder: Path) -> bool:
        """Return whether `folder` is that of this run."""
        return self.path.resolve() == folder.resolve()

    @property
    def may_commit(self) -> bool:
        """False if a commit would replace one that was not loaded."""
        return self.source is None or self.is_loaded

    def check_loaded(self) -> None:
        """Raise UsageError if a step would replace a commit that was not loaded."""
        if not self.may_commit:
            raise UsageError(
                f"{self.path} holds a run that this one would replace. Resume it with engine.resume(), name "
                "another run (infinity.run), or remove the folder."
            )

    def next_number(self) -> int:
        return 1 if self.record is None else self.record.number + 1

    def write(self, record: Record) -> None:
        """Write this rank's record of a commit. Raises OSError."""
        folder = self.folders[0]
        if self._manifest is not None:  # not before: a process that only loads the run must not leave its command
            _write_manifest(files.manifest_file(folder, self.rank), self._manifest)
            self._manifest = None
        write_record(files.record_file(folder, self.rank, record.number), record)
        if record.number <= 2:
            files.sync_names(self.runs, self.generation)
        self.record = record

    def forget_previous(self) -> None:
        """Invalidate the record before the last one, which all ranks have, since the next updates write its slots.

        If the last record is damaged, the previous one must not be read in its place. No-op without a record.
        """
        if self.record is not None:
            invalidate(files.record_file(self.folders[0], self.rank, self.record.number - 1), sync=False)

    def conclude(self) -> None:
        """Record that all ranks have the last commit, and remove what it has replaced.

        A power cut may undo the end of the previous record, so only a second fault is dangerous until the next start.
        """
        assert self.record is not None
        self.forget_previous()
        if self.source is not None and self.source.generation != self.generation:
            files.remove_generation(self.runs, self.source.generation)
        self.is_loaded = True  # first, since the model's thread reads both
        self.source = Source(self.generation, self.next_number() - 1, 0)

    def close(self) -> None:
        """Unlock the run, and remove a generation without a commit. Idempotent."""
        if self.record is None:
            for folder in reversed(self.folders):
                files.remove_files(folder, f"rank-{self.rank:05d}.*")
                _remove_empty(folder)
        is_empty = self.record is None and self.source is None
        self._lock.close(remove=is_empty)
        if is_empty:
            for run in self.runs:
                _remove_empty(run)


def open_run(plan: Plan, config: Config, ranks: Communicator) -> DurableRun:
    """Lock the folder of a plan's durable run, and choose its generation. Collective.

    Raises StorageError if another process holds it, if it is not a private folder of this user, or if it cannot be read
    or written.
    """
    assert plan.io is not None and plan.io.durable is not None
    rank, size = ranks.model.number * ranks.size + ranks.rank, ranks.size * ranks.model.size
    runs: list[Path] = []
    lock: files.Lock | None = None
    generation, begins = 0, False
    try:
        for folder in plan.io.folders:
            check_folder(folder)
            runs.append(folder.absolute() / plan.io.durable.run)  # since the script may change its working directory
            if len(runs) > 1 and files.is_run(runs[-1]):
                raise StorageError(
                    f"{runs[-1]} is the first folder of a run: name the folders in nvme_path that it was begun with, "
                    "in the same order, or another run (infinity.run)"
                )
            files.make_private(runs[-1])
        lock = files.Lock(runs[0], rank)
        files.check_unheld(runs[0], size)
        manifest = manifest_of(plan, config, size)
        seen = ranks.gather(_seen(runs[0], rank, manifest))
        source, is_same = choose(size, seen, runs[0])
        begins = source is None
        numbers = [number for each in seen for number in each]
        for number in {*numbers} - ({source.generation} if source is not None else set()):
            files.remove_generation(runs, number)
        record = None
        if source is not None and is_same:
            generation = source.generation
            folder = files.generation_folder(runs[0], generation)
            files.drop_records_after(folder, rank, source.number)
            record = read_record(files.record_file(folder, rank, source.number))
            if record is None or record.number != source.number:
                raise StorageError(
                    f"{folder} changed while it was opened, so another process writes it: end that process and restart"
                )
            confirm(files.record_file(folder, rank, source.number))  # the next updates write the slots of the previous
        else:
            generation = max(numbers, default=0) + 1
            files.check_empty([files.generation_folder(run, generation) for run in runs], rank)
        for run in runs:
            files.make_private(files.generation_folder(run, generation))
        if record is None:
            _write_manifest(files.manifest_file(files.generation_folder(runs[0], generation), rank), manifest)
        held = DurableRun(runs, rank, generation, source, record, lock, None if record is None else manifest)
        try:
            ranks.barrier()  # a rank that fails after this removes the folder if it is empty
            held.forget_previous()
        except BaseException:
            held.close()
            raise
        return held
    except BaseException as error:
        _withdraw(runs, generation, lock, begins=begins or not any(map(files.is_run, runs[:1])))
        if isinstance(error, OSError):
            raise StorageError(f"the durable run in {runs[0]} cannot be opened: {error}") from error
        raise


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
        number = files.last_commit(before, commits)
        if number:
            is_same = before == ranks and len(views) == len(seen) and all(view.is_same for view in views)
            return Source(generation, number, before), is_same
        _check_begun(before, commits, {rank for view in views for rank in view.damaged}, run)
    return None, False


def _check_begun(ranks: int, commits: Mapping[int, set[int]], damaged: set[int], run: Path) -> None:
    """Raise CheckpointError if all ranks of a generation have committed, and files of some are missing or damaged."""
    missing = [rank for rank in range(ranks) if rank not in commits]
    newest = max((max(numbers, default=0) for numbers in commits.values()), default=0)
    if damaged:
        problem = f"the records of rank {', '.join(map(str, sorted(damaged)))} are damaged"
    elif newest and missing:
        problem = f"the files of rank {', '.join(map(str, missing))} are missing, or their manifests are damaged"
    elif newest > 1:
        problem = "its ranks have records of different steps"
    else:
        return
    raise CheckpointError(
        f"{run} holds a run that cannot be resumed: {problem}. Restore the files of all ranks, or name another run "
        "(infinity.run) and load a checkpoint."
    )


def last_source(ranks: Communicator, run: Path) -> Source | None:
    """Return the last commit of a run that this process does not hold. Collective."""
    generations = files.read_generations(run)
    seen = {each.number: Seen(_ranks_of(each), each.commits, False, each.damaged) for each in generations}
    return choose(0, ranks.gather(seen), run)[0]


def digest(layout: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()


def _seen(run: Path, rank: int, manifest: Manifest) -> dict[int, Seen]:
    found = {}
    for generation in files.read_generations(run):
        own = generation.manifests.get(rank)
        is_same = own is not None and digest(own.layout) == digest(manifest.layout)
        found[generation.number] = Seen(_ranks_of(generation), generation.commits, is_same, generation.damaged)
    return found


def _ranks_of(generation: files.Generation) -> int:
    return max(each.ranks for each in generation.manifests.values())


def _write_manifest(path: Path, manifest: Manifest) -> None:
    """Replace a manifest atomically: a kill at any moment leaves the former one or the new one."""
    part = path.with_suffix(files.PART)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(fd)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
    files.sync_folder(path.parent)


def _withdraw(runs: Sequence[Path], generation: int, lock: files.Lock | None, *, begins: bool) -> None:
    """Unlock a run that could not be opened, and remove empty folders. begins: it has no commit."""
    for run in reversed(runs):
        _remove_empty(files.generation_folder(run, generation))
    if lock is not None:
        lock.close(remove=begins)
    for run in reversed(runs):
        _remove_empty(run)


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
