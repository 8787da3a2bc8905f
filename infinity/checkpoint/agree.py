"""Checks that all ranks save or load the same checkpoint; otherwise all of them raise."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infinity.checkpoint.format import INDEX, LATEST, find
from infinity.comm.agreement import by_value
from infinity.comm.communicator import Communicator
from infinity.errors import CheckpointError, RanksError

_SAVE, _LOAD = "saves", "loads"


@dataclass(frozen=True)
class _Call:
    """The arguments of one rank's save or load, and its error."""

    does: str
    tag: str
    directory: str
    """The path that the caller gave, made absolute."""
    resolved: str
    """The same path with symbolic links resolved. Ranks agree if either `directory` or this is equal on all of them."""
    content: int = 0
    """CRC-32 of the index to load, which may differ between machines. 0: a save, or the index cannot be read."""
    background: bool = False
    error: str = ""
    """Text of this rank's CheckpointError; empty if there is none."""

    def __str__(self) -> str:
        return f"{self.does} tag {self.tag!r} in {self.directory}" + (f" ({self.error})" if self.error else "")


def target_of(ranks: Communicator, directory: str | Path, tag: str, background: bool) -> Path:
    """Return the folder to write, the same on all ranks. All ranks call it; nothing is changed.

    Raises RanksError if the ranks differ in directory, tag or `background`, and CheckpointError if directory or tag
    cannot name a checkpoint.
    """
    return _agreed(ranks, _SAVE, directory, tag, lambda: _writable(directory, tag), background)


def folder_of(ranks: Communicator, directory: str | Path, tag: str | None) -> Path:
    """Return the folder to read, the same on all ranks. All ranks call it. tag: None means the one `latest` names.

    Raises RanksError if the ranks differ in directory, tag or index, and CheckpointError if there is no checkpoint.
    """
    return _agreed(ranks, _LOAD, directory, tag, lambda: _readable(directory, tag), False)


def _writable(directory: str | Path, tag: str) -> Path:
    _check_directory(directory)
    if not tag or tag != Path(tag).name or tag.startswith(".") or tag == LATEST or "\0" in tag:
        raise CheckpointError(
            f"tag {tag!r} cannot be the name of a checkpoint's folder: not empty, no slashes, no dot at its beginning, "
            f"and not {LATEST!r}, which is the file that names the last one"
        )
    return Path(directory) / tag


def _readable(directory: str | Path, tag: str | None) -> Path:
    _check_directory(directory)
    return find(Path(directory), tag)


def _check_directory(directory: str | Path) -> None:
    if not os.fspath(directory):
        raise CheckpointError(
            'the directory of the checkpoint is "", which would be the current folder: name a folder, or "." for it'
        )


def _agreed(
    ranks: Communicator, does: str, directory: str | Path, tag: str | None, folder: Callable[[], Path], background: bool
) -> Path:
    found, error = None, None
    try:
        found = folder()
    except CheckpointError as caught:
        error = caught
    called = os.fspath(directory)
    mine = _Call(
        does,
        found.name if found is not None and tag is None else str(tag or ""),
        os.path.abspath(called),
        os.path.realpath(called),
        _content(found) if does == _LOAD and found is not None else 0,
        background,
        str(error or ""),
    )
    calls: list[_Call] = ranks.gather(mine)
    if (different := _difference(calls)) is not None:
        raise RanksError(different)
    if error is not None:
        raise error
    assert found is not None
    return found


def _content(folder: Path) -> int:
    try:
        return zlib.crc32((folder / INDEX).read_bytes())
    except OSError:
        return 0  # `read_index` raises the error


def _difference(calls: list[_Call]) -> str | None:
    """The error text if the calls of all ranks differ, identical on all of them; None if they agree."""
    one_place = len({call.directory for call in calls}) == 1 or len({call.resolved for call in calls}) == 1
    if not one_place or len({(call.does, call.tag, bool(call.error)) for call in calls}) > 1:
        who = "; ".join(f"{ranks} {said}" for said, ranks in by_value([str(call) for call in calls]).items())
        return f"the ranks name different checkpoints. {who}. Pass the same directory and tag on all ranks."
    if len({call.background for call in calls}) > 1:
        sides = by_value([call.background for call in calls])
        return (
            f"some ranks save in the background and others do not ({sides[True]} and {sides[False]}): pass the same "
            "`background` on all"
        )
    if len({call.content for call in calls}) > 1:
        who = "; ".join(f"{ranks} crc32 {found:08x}" for found, ranks in by_value([c.content for c in calls]).items())
        return (
            f"the ranks find different checkpoints at {calls[0].directory}, tag {calls[0].tag!r}: {who} of {INDEX}. "
            "Copy one of them to all machines, or use a shared folder."
        )
    return None
