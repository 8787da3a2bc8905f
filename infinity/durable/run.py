"""A durable run that this process holds as one rank: the generation that it writes, and the commit that it resumes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.checkpoint.rank_states import stripe_of, well_formed
from infinity.comm.communicator import Communicator
from infinity.durable import folder as files
from infinity.durable.choose import Source, check_layout, choose, digest, seen_by
from infinity.durable.manifest import Manifest, manifest_of, read_manifest
from infinity.durable.record import (
    CHECKSUMS,
    DIGESTS,
    Proof,
    Record,
    confirm,
    invalidate,
    read_record,
    sync_folder,
    write_record,
)
from infinity.errors import StorageError, UsageError
from infinity.observe.log import logger
from infinity.plan.io import IoPlan
from infinity.plan.plan import Plan
from infinity.tiers.digests import Digests
from infinity.tiers.durable import DurableFiles
from infinity.tiers.files import check_folder

if TYPE_CHECKING:
    from infinity.config import Config


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
        manifest: Manifest,
        job: str,
    ) -> None:
        """runs: the run's folder in each folder of nvme_path. record: of the commit whose slots the files hold.

        manifest: written with the first commit, and again if its file is changed. job: drawn by this start, equal on
        all ranks.
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
        self._manifest = replace(manifest, has_commit=record is not None)
        self._written: tuple[int, ...] = ()
        """Identity of the manifest's file that this process has written; empty: none yet."""
        self._proof = Proof(job, digest(manifest.layout))

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

    def note_loaded(self) -> None:
        """Record that the present states go on from the last commit."""
        self.is_loaded = True

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

    def check_held(self) -> None:
        """Check that this process still holds the lock. Raises StorageError if another one has taken it."""
        self._lock.check()

    def write(self, record: Record, digests: Digests) -> None:
        """Write this rank's record of a commit. digests: of its states. Raises OSError.

        The manifest is written with the first commit, and again if its file was removed, replaced or altered. It is not
        written before: a process that only loads the run must not leave its command.
        """
        folder = self.folders[0]
        path = files.manifest_file(folder, self.rank)
        if not self._written or self._written != _identity(path):
            if self._written:
                logger.warning("%s was removed or altered while the run trained, and is written again", path)
            self._put_manifest(path)
        proof = replace(self._proof, block=digests.block)
        record = replace(record, proof=proof, blobs={**record.blobs, DIGESTS: digests.packed})
        write_record(files.record_file(folder, self.rank, record.number), record)
        if record.number <= 2:
            files.sync_names(self.runs, self.generation)
        self.record = record

    def _put_manifest(self, path: Path) -> None:
        _write_manifest(path, self._manifest)
        self._written = _identity(path)

    def withdraw(self, before: Record | None) -> None:
        """Invalidate the record of a commit that other ranks lack, before its slots are written again. Raises OSError.

        before: of the commit before it.
        """
        if self.record is not None and self.record is not before:
            invalidate(files.record_file(self.folders[0], self.rank, self.record.number), sync=True)
            self.record = before

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
        if not self._manifest.has_commit:
            self._manifest = replace(self._manifest, has_commit=True)
            self._put_manifest(files.manifest_file(self.folders[0], self.rank))
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


def recorded_stripe(io: IoPlan, ranks: Communicator) -> IoPlan | None:
    """Return a plan whose stripe is that of the newest generation of its run; None if there is none."""
    if io.durable is None:
        return None
    run, rank = io.folders[0] / io.durable.run, ranks.model.number * ranks.size + ranks.rank
    for folder in sorted(run.glob("[0-9]*"), reverse=True):
        manifest = read_manifest(path := files.manifest_file(folder, rank))
        if manifest is not None and manifest.layout.get("folders") == len(io.folders):
            with well_formed(path):
                return replace(io, stripe=replace(io.stripe, weights=stripe_of(manifest.layout).weights))
    return None


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
        files.check_manifests(runs)  # before the exchange, after which a rank may make files
        manifest = manifest_of(plan, config, size)
        gathered = ranks.gather((seen_by(runs[0], rank, manifest), secrets.token_hex(8)))
        seen, job = [each for each, _ in gathered], gathered[0][1]
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
            check_layout(record, manifest, folder)
            confirm(files.record_file(folder, rank, source.number))  # the next updates write the slots of the previous
        else:
            generation = max(numbers, default=0) + 1
        for run in runs:
            files.make_private(files.generation_folder(run, generation))
        if record is None:
            _write_manifest(files.manifest_file(files.generation_folder(runs[0], generation), rank), manifest)
        held = DurableRun(runs, rank, generation, source, record, lock, manifest, job)
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
    sync_folder(path.parent)


def _identity(path: Path) -> tuple[int, ...]:
    """Return numbers that differ once a file is replaced or altered; empty if it does not exist."""
    try:
        status = os.lstat(path)
    except OSError:
        return ()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _withdraw(runs: Sequence[Path], generation: int, lock: files.Lock | None, *, begins: bool) -> None:
    """Unlock a run that could not be opened, and remove empty folders. begins: it has no commit."""
    for run in reversed(runs):
        _remove_empty(files.generation_folder(run, generation))
    if lock is not None:
        lock.close(remove=begins)
    for run in reversed(runs):
        _remove_empty(run)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # others have files there
        folder.rmdir()
