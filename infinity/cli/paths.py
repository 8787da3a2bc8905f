"""Checks the folders and files in command-line options before any long work."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from infinity.cli.console import USAGE, fail, note
from infinity.outputs import replacing

_IN_MEMORY = ("tmpfs", "ramfs")


def check_folders(paths: Sequence[Path]) -> None:
    """Exit with an error if a folder does not exist or is listed twice."""
    for path in paths:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            fail(f"--path {path} does not exist: pass a folder on the drive to measure", USAGE)
        except OSError as error:
            fail(f"--path {path}: {error.strerror}: pass a folder on the drive to measure", USAGE)
        if not stat.S_ISDIR(mode):
            fail(f"--path {path} is not a folder: pass a folder on the drive to measure", USAGE)
    if len({path.resolve() for path in paths}) < len(paths):
        fail("--path lists one folder twice: pass each drive's folder once", USAGE)


def check_output(option: str, file: Path) -> None:
    """Exit with an error if `file` cannot be written."""
    try:
        is_folder = stat.S_ISDIR(file.stat().st_mode)
    except FileNotFoundError:
        writable = os.access(file.parent, os.W_OK | os.X_OK)
    except OSError as error:
        fail(f"{option} {file} cannot be written: {error.strerror}", USAGE)
    else:
        writable = not is_folder and os.access(file, os.W_OK)
    if not writable:
        fail(f"{option} {file} cannot be written: pass a file in an existing, writable folder", USAGE)


def write_output(option: str, file: Path, text: str) -> str:
    """Write `text` to `file`, completely or not at all. Return the error text, or "" on success.

    A file that is no regular one, or that lies in a folder that is not writable, is written in place.
    """
    target = file.resolve()
    try:
        if not os.access(target.parent, os.W_OK) or (target.exists() and not target.is_file()):
            target.write_text(text, encoding="utf-8")
            return ""
        with replacing(target) as aside:
            aside.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"{option} {file} was not written: {error.strerror or error}"
    return ""


def file_system(path: Path) -> str:
    """Return the type of the file system of `path`, such as "ext4"."""
    import psutil

    resolved = path.resolve()
    parents = {resolved, *resolved.parents}
    mounts = [part for part in psutil.disk_partitions(all=True) if Path(part.mountpoint) in parents]
    if not mounts:
        return "unknown"
    # The innermost mount. If several share a mount point, the last one hides the others.
    return str(max(enumerate(mounts), key=lambda each: (len(each[1].mountpoint), each[0]))[1].fstype)


def in_memory(kind: str) -> bool:
    """Return True if files of this file system type are in memory. Newer kernels accept `O_DIRECT` there, too."""
    return kind in _IN_MEMORY


def note_memory_folders(paths: Sequence[Path]) -> None:
    """Print a note for each folder on a file system in memory."""
    for path in paths:
        kind = file_system(path)
        if in_memory(kind):
            note(f"{path} is on {kind}, which is memory: the results are those of memory, not of a drive")
