"""An output folder that appears complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infinity.errors import OutOfSpaceError, UsageError


def check_out(out: Path, nbytes: int) -> None:
    """Raise UsageError if `out` exists and is not an empty folder, OutOfSpaceError if its drive lacks `nbytes`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} already exists and is not an empty folder: pass a new path")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(above).free
    if nbytes > free:
        raise OutOfSpaceError(str(above), nbytes, free, "free space, or write to another drive")


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` that is renamed to `out` after the block, or removed if the block fails."""
    partial = out.absolute().with_name(f".{out.absolute().name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
