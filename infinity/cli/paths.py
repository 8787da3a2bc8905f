"""The folders and files that commands are given: whether they will do, before anything takes time."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from infinity.cli.console import USAGE, fail, note

_IN_MEMORY = ("tmpfs", "ramfs")


def check_folders(paths: Sequence[Path]) -> None:
    """Ends the command where a folder is not there, or is there twice."""
    for path in paths:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            fail(f"--path {path} does not exist: name a folder on the drive to measure", USAGE)
        except OSError as error:
            fail(f"--path {path}: {error.strerror}: name a folder on the drive to measure", USAGE)
        if not stat.S_ISDIR(mode):
            fail(f"--path {path} is not a folder: name a folder on the drive to measure", USAGE)
    if len({path.resolve() for path in paths}) < len(paths):
        fail("--path names one folder twice: name each drive's folder once", USAGE)


def check_output(option: str, file: Path) -> None:
    """Ends the command where a result could not be written to `file`."""
    try:
        there = stat.S_ISDIR(file.stat().st_mode)
    except FileNotFoundError:
        writable = os.access(file.parent, os.W_OK | os.X_OK)
    except OSError as error:
        fail(f"{option} {file} cannot be written: {error.strerror}", USAGE)
    else:
        writable = not there and os.access(file, os.W_OK)
    if not writable:
        fail(f"{option} {file} cannot be written: name a file in a folder that exists and is writable", USAGE)


def file_system(path: Path) -> str:
    """The type of the file system mounted where `path` is, such as "ext4"."""
    import psutil

    at = path.resolve()
    around = {at, *at.parents}
    found = [part for part in psutil.disk_partitions(all=True) if Path(part.mountpoint) in around]
    # The innermost, and of several mounted at one place the last, which hides the others.
    return max(enumerate(found), key=lambda each: (len(each[1].mountpoint), each[0]))[1].fstype if found else "unknown"


def in_memory(kind: str) -> bool:
    """Whether files there are memory, on a file system of that type: newer kernels take `O_DIRECT` there, too."""
    return kind in _IN_MEMORY


def note_what_is_memory(paths: Sequence[Path]) -> None:
    """A note for each folder that is on no drive at all."""
    for path in paths:
        kind = file_system(path)
        if in_memory(kind):
            note(f"{path} is on {kind}: that is memory, not a drive, and its figures are those of memory")
