"""The folder of a durable run.

    NVME_PATH/RUN/rank-00000.lock                held by the process of this rank
    NVME_PATH/RUN/0001/rank-00000.states         slots of parameters and optimizer states; with several folders in
                                                 nvme_path, `.states-1` in the second, and so on
    NVME_PATH/RUN/0001/rank-00000.json           layout of the states, and how the run was started
    NVME_PATH/RUN/0001/rank-00000.record-0, -1   the last two commits
    NVME_PATH/RUN/0001/rank-00000.part           a manifest that is being written

A generation (0001) belongs to one layout of states and one number of ranks. A run that resumes with another begins
the next generation, whose first commit removes the previous one. Only the owner of the run may read the folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from infinity.durable.manifest import Manifest, read_manifest
from infinity.durable.record import invalidate, read_record, sync_folder
from infinity.errors import StorageError
from infinity.observe.log import logger

MANIFEST = ".json"
PART = ".part"
"""Suffix of a manifest that is being written. A start overwrites the one that a killed process left."""
_POLL = 0.1
"""Seconds between two attempts to lock a run that another process reads."""


@dataclass(frozen=True)
class Generation:
    """A generation as one machine sees it."""

    number: int
    manifests: Mapping[int, Manifest]
    """By rank."""
    commits: Mapping[int, tuple[int, ...]]
    """Rank → numbers of its intact records."""
    damaged: tuple[int, ...]
    """Ranks that have committed, and have no intact record."""
    jobs: Mapping[tuple[int, int], str]
    """Rank and number of an intact record → the job that wrote it."""


def generation_folder(run: Path, number: int) -> Path:
    return run / f"{number:04d}"


def record_file(folder: Path, rank: int, number: int) -> Path:
    return folder / f"rank-{rank:05d}.record-{number % 2}"


def manifest_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}{MANIFEST}"


def is_run(folder: Path) -> bool:
    """Return whether `folder` is that of a durable run, with or without a commit."""
    return any(ranks_in(each) for each in _generations(folder))


def make_private(folder: Path) -> None:
    """Create a folder that only its owner may read. Raises StorageError if something else has its name."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise StorageError(
                f"{folder} is not a folder of this user: remove it, or name another run (infinity.run)"
            ) from None
        os.chmod(folder, 0o700)
    except OSError as error:
        raise StorageError(f"cannot create the folder {folder}: {error.strerror}; name another (nvme_path)") from error


def read_generations(run: Path) -> list[Generation]:
    """Return the generations of a run, in their order, without those that lack a manifest."""
    found = []
    for folder in _generations(run):
        manifests = {rank: read_manifest(manifest_file(folder, rank)) for rank in ranks_in(folder)}
        read = {rank: manifest for rank, manifest in manifests.items() if manifest is not None}
        records = {rank: [read_record(record_file(folder, rank, slot)) for slot in (0, 1)] for rank in read}
        intact = {rank: [record for record in both if record is not None] for rank, both in records.items()}
        commits = {rank: tuple(record.number for record in own) for rank, own in intact.items()}
        jobs = {(rank, record.number): record.proof.job for rank, own in intact.items() for record in own}
        damaged = tuple(
            rank
            for rank, numbers in commits.items()
            if not numbers and (read[rank].has_commit or record_file(folder, rank, 0).exists())  # begun by commit 1
        )
        if read:
            found.append(Generation(int(folder.name), read, commits, damaged, jobs))
    return found


def ranks_in(folder: Path) -> list[int]:
    """Return the ranks that have a manifest in the folder of a generation, which may be damaged."""
    names = (path.name.removeprefix("rank-").removesuffix(MANIFEST) for path in _listed(folder, f"rank-*{MANIFEST}"))
    return sorted(int(name) for name in names if name.isdigit())


def without_manifest(runs: Sequence[Path]) -> list[Path]:
    """Return the folders of generations that have files and no readable manifest. runs: the run's folder in each folder
    of nvme_path; manifests are in the first.
    """
    found = []
    for folder in (folder for run in runs for folder in _generations(run)):
        first = runs[0] / folder.name
        is_readable = any(read_manifest(manifest_file(first, rank)) is not None for rank in ranks_in(first))
        if not is_readable and any(path.suffix != PART for path in _listed(folder, "rank-*")):
            found.append(folder)
    return found


def check_manifests(runs: Sequence[Path]) -> None:
    """Raise StorageError if files of a run have no manifest: it was lost, or the run was begun with other folders."""
    for folder in without_manifest(runs):
        for rank in ranks_in(folder):
            raise StorageError(
                f"{manifest_file(folder, rank)} is damaged, and the states beside it cannot be read without it: "
                "restore the file from a copy, or name another run (infinity.run) and load a checkpoint"
            )
        lost = min(path.stem for path in _listed(folder, "rank-*") if path.suffix != PART)
        raise StorageError(
            f"{folder} has files of a run, but no manifest. If {lost}{MANIFEST} was lost, restore it from a copy. "
            "Otherwise name the folders in nvme_path that the run was begun with, in the same order, or another run "
            "(infinity.run)."
        )


def drop_records_after(folder: Path, rank: int, number: int) -> None:
    """Invalidate a rank's records of commits that other ranks lack, before their slots are written again."""
    for slot in (0, 1):
        record = read_record(record_file(folder, rank, slot))
        if record is None or record.number > number:
            invalidate(record_file(folder, rank, slot), sync=True)
    sync_folder(folder)


def sync_names(runs: Sequence[Path], number: int) -> None:
    """Wait until the names of a generation's files and folders have reached the drives."""
    for run in runs:
        for folder in (generation_folder(run, number), run):
            sync_folder(folder)
        with suppress(PermissionError):  # others may own it
            sync_folder(run.parent)


def remove_generation(runs: Sequence[Path], number: int) -> None:
    """Remove the files of all ranks, and the folders."""
    for run in reversed(runs):
        folder = generation_folder(run, number)
        remove_files(folder, "*")
        shutil.rmtree(folder, ignore_errors=True)


def remove_files(folder: Path, pattern: str) -> None:
    """Remove files, manifests last, since files without a manifest cannot be attributed to a run."""
    for path in sorted(_listed(folder, pattern), key=lambda path: path.suffix == MANIFEST):
        with suppress(OSError):
            path.unlink()


class Lock:
    """A lock on a run, held by this process as `rank` until `close` or the end of the process."""

    def __init__(self, run: Path, rank: int) -> None:
        """Wait while other processes read the run. Raises StorageError if one trains it."""
        self._path = run / f"rank-{rank:05d}.lock"
        self._fd = _exclusive(self._path)
        _held.add(self)

    def check(self) -> None:
        """Lock the file at the path if the locked one was removed or replaced.

        Raises StorageError if another process holds it, and OSError if there is no such folder any more.
        """
        if _is_at(self._fd, self._path):
            return
        fd = _open(self._path, os.O_RDWR | os.O_CREAT)
        with _closed_on_error(fd):
            if not (_try_lock(fd, fcntl.LOCK_EX) and _is_at(fd, self._path)):
                raise _in_use(self._path)
        logger.warning("%s was removed or replaced while the run trained, and is locked again", self._path)
        former, self._fd = self._fd, fd
        os.close(former)

    def close(self, *, remove: bool = False) -> None:
        """Unlock. remove: also delete the file, if this process still holds the lock. Idempotent."""
        if self._fd < 0:
            return
        if remove:
            self._path.unlink(missing_ok=True)  # first, so that no process locks a file that is about to be removed
        os.close(self._fd)
        self._fd = -1


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close the locks in a forked child, such as a loader's worker, which may outlive its parent."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def check_unheld(run: Path, first: int = 0) -> None:
    """Raise StorageError if a process trains the run as rank `first` or above, such as one of a job with more ranks."""
    with unchanged(run, first):
        pass


@contextmanager
def unchanged(run: Path, first: int = 0) -> Iterator[None]:
    """Keep other processes from training a run as rank `first` or above in the block. Raises StorageError if one does.

    Holds their locks shared, since all ranks of this job do so at once.
    """
    with ExitStack() as stack:
        for path in _listed(run, "rank-*.lock"):
            number = path.name.removeprefix("rank-").removesuffix(".lock")
            if number.isdigit() and int(number) >= first:
                with suppress(FileNotFoundError):  # its process ended without a commit and removed it
                    stack.callback(os.close, _shared(path))
        yield


def _exclusive(path: Path) -> int:
    """Lock a file, which is created if absent. Waits while only readers hold it."""
    waits, is_new = False, not path.exists()
    while True:
        fd = _open(path, os.O_RDWR | os.O_CREAT)
        with _closed_on_error(fd), _refused_by_drive(path, is_new):
            if _try_lock(fd, fcntl.LOCK_EX):
                if _is_at(fd, path):
                    return fd
            elif not _try_lock(fd, fcntl.LOCK_SH):
                raise _in_use(path)
            elif not waits:
                waits = True
                logger.warning("Waiting for a process that reads the durable run %s", path.parent)
        os.close(fd)
        time.sleep(_POLL)


def _shared(path: Path) -> int:
    fd = _open(path, os.O_RDONLY)
    with _closed_on_error(fd):
        if not _try_lock(fd, fcntl.LOCK_SH):
            raise _in_use(path)
    return fd


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


@contextmanager
def _closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


@contextmanager
def _refused_by_drive(path: Path, is_new: bool) -> Iterator[None]:
    """Raise StorageError, and remove a file that was created, if the file system refuses locks."""
    try:
        yield
    except OSError as error:
        if is_new:
            path.unlink(missing_ok=True)
        raise StorageError(
            f"{path} cannot be locked: {error.strerror}; name a folder on a local drive (nvme_path)"
        ) from error


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Return whether `path` is the open file: its former holder may have removed it before it was locked."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _in_use(path: Path) -> StorageError:
    return StorageError(
        f"{path.parent} is in use by another process, which trains this run: wait until it ends, or name another "
        "run (infinity.run)"
    )


def _listed(folder: Path, pattern: str) -> list[Path]:
    """Return the paths in a folder; none if it does not exist, or another rank removes it meanwhile."""
    try:
        return list(folder.glob(pattern))
    except FileNotFoundError:  # up to Python 3.12, glob raises it if the folder goes after its first look
        return []


def _generations(run: Path) -> list[Path]:
    try:
        found = [path for path in run.iterdir() if path.name.isdigit() and path.is_dir() and not path.is_symlink()]
    except OSError:
        return []
    return sorted(found, key=lambda path: int(path.name))
