"""Ranks that save or load one checkpoint: all of them name the same one, or all of them raise."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infinity.checkpoint.format import INDEX, LATEST, find
from infinity.comm.agreement import by_value
from infinity.comm.collectives import Ranks
from infinity.errors import CheckpointError, RanksError

_SAVE, _LOAD = "saves", "loads"


@dataclass(frozen=True)
class _Call:
    """What one rank was asked for."""

    does: str
    tag: str
    directory: str
    """Absolute, as it was given."""
    resolved: str
    """Without symbolic links: two names of one folder are one, and so is one name that machines link differently."""
    content: int = 0
    """The CRC-32 of the index of what is loaded, which machines that share no file system could have two of."""
    background: bool = False
    error: str = ""
    """Why this rank cannot go on."""

    def __str__(self) -> str:
        return f"{self.does} tag {self.tag!r} in {self.directory}" + (f" ({self.error})" if self.error else "")


def target_of(ranks: Ranks, directory: str | Path, tag: str, background: bool) -> Path:
    """The folder that is to be written, checked and the same on all ranks, which all call this.

    RanksError where they name several, CheckpointError where nobody may write there; nothing has been changed.
    """
    return _agreed(ranks, _SAVE, directory, tag, lambda: _writable(directory, tag), background)


def folder_of(ranks: Ranks, directory: str | Path, tag: str | None) -> Path:
    """The folder that is to be read, the same on all ranks, which all call this. tag: None is what `latest` names."""
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
    ranks: Ranks, does: str, directory: str | Path, tag: str | None, folder: Callable[[], Path], background: bool
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
        return 0  # `read_index` says what is wrong with it


def _difference(calls: list[_Call]) -> str | None:
    """What keeps the ranks from doing this together, the same text on all of them."""
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
