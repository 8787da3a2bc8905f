"""Checks that all ranks save or load the same checkpoint, and that all succeed. Raises on all of them otherwise."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from infinity.checkpoint.format import INDEX, LATEST, find
from infinity.comm.agreement.comparison import by_value
from infinity.comm.communicator import Communicator
from infinity.comm.side import SideChannel
from infinity.errors import CheckpointError, RanksError
from infinity.inputs import is_file_name, read_input

T = TypeVar("T")
_SAVE, _LOAD = "saves", "loads"


@dataclass(frozen=True)
class _Call:
    """The arguments of one rank's save or load, and its error."""

    does: str
    tag: str
    directory: str
    """The caller's path, made absolute."""
    resolved: str
    """The same path with symbolic links resolved. Ranks agree if either `directory` or this is equal on all of them."""
    content: int = 0
    """CRC-32 of the index to load, which may differ between machines; 0 for a save or an unreadable index."""
    background: bool = False
    error: str = ""
    """Text of this rank's CheckpointError; empty if there is none."""

    def __str__(self) -> str:
        return f"{self.does} tag {self.tag!r} in {self.directory}" + (f" ({self.error})" if self.error else "")


def target_of(ranks: Communicator, directory: str | Path, tag: str, background: bool) -> Path:
    """Return the folder to write, the same on all ranks. Collective; writes nothing.

    Raises RanksError if the ranks differ in directory, tag or `background`, and CheckpointError if directory or tag
    cannot name a checkpoint.
    """

    def writable() -> Path:
        folder = _checked(directory)
        if not is_file_name(tag) or tag.startswith(".") or tag == LATEST:
            raise CheckpointError(
                f"tag {tag!r} cannot be the name of a checkpoint's folder. Use a name that is not empty, contains no "
                f"slash or control character, does not start with a dot, and is not {LATEST!r}, the file that stores "
                "the last tag."
            )
        return folder / tag

    return _agreed(ranks, _SAVE, directory, tag, writable, background)


def folder_of(ranks: Communicator, directory: str | Path, tag: str | None) -> Path:
    """Return the folder to read, the same on all ranks. Collective. tag: None selects the tag in `latest`.

    Raises RanksError if the ranks differ in directory, tag or index, and CheckpointError if there is no checkpoint.
    """
    return _agreed(ranks, _LOAD, directory, tag, lambda: find(_checked(directory), tag), False)


def run_of(ranks: Communicator, directory: str | Path) -> Path:
    """Return the folder of a durable run, the same on all ranks. Collective. Raises RanksError if the ranks differ."""
    return _agreed(ranks, _LOAD, directory, None, lambda: Path(directory), False)


def together(channel: SideChannel, work: Callable[[], T]) -> T:
    """Return `work()`. Collective; if it fails on one rank, all ranks raise."""
    error: Exception | None = None
    try:
        done = work()
    except Exception as caught:  # noqa: BLE001 - raised below, once all ranks know
        error = caught
    if channel.sum(float(error is not None)):
        texts = channel.gather("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        raise CheckpointError("; ".join(f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text))
    return done


def _checked(directory: str | Path) -> Path:
    if not os.fspath(directory):
        raise CheckpointError(
            'the checkpoint directory is "", which would be the current folder. Pass a path, or "." for the current '
            "folder."
        )
    return Path(directory)


def _agreed(
    ranks: Communicator, does: str, directory: str | Path, tag: str | None, folder: Callable[[], Path], background: bool
) -> Path:
    resolved, error = None, None
    try:
        resolved = folder()
    except CheckpointError as caught:
        error = caught
    path = os.fspath(directory)
    call = _Call(
        does,
        resolved.name if resolved is not None and tag is None else str(tag or ""),
        os.path.abspath(path),
        os.path.realpath(path),
        _content(resolved) if does == _LOAD and resolved is not None else 0,
        background,
        str(error or ""),
    )
    calls: list[_Call] = ranks.gather(call)
    if (different := _difference(calls)) is not None:
        raise RanksError(different)
    if error is not None:
        raise error
    assert resolved is not None
    return resolved


def _content(folder: Path) -> int:
    try:
        return zlib.crc32(read_input(folder / INDEX))
    except OSError:
        return 0  # `read_index` raises the error


def _difference(calls: list[_Call]) -> str | None:
    """Return the error text, the same on all ranks, if their calls differ; None if they agree."""
    one_place = len({call.directory for call in calls}) == 1 or len({call.resolved for call in calls}) == 1
    if not one_place or len({(call.does, call.tag, bool(call.error)) for call in calls}) > 1:
        who = "; ".join(f"{ranks} {text}" for text, ranks in by_value([str(call) for call in calls]).items())
        return f"the ranks name different checkpoints. {who}. Pass the same directory and tag on all ranks."
    if len({call.background for call in calls}) > 1:
        sides = by_value([call.background for call in calls])
        return (
            f"some ranks save in the background and others do not ({sides[True]} and {sides[False]}). Pass the same "
            "`background` on all ranks."
        )
    if len({call.content for call in calls}) > 1:
        who = "; ".join(f"{ranks} crc32 {crc:08x}" for crc, ranks in by_value([c.content for c in calls]).items())
        return (
            f"the ranks find different checkpoints at {calls[0].directory}, tag {calls[0].tag!r}: {who} of {INDEX}. "
            "Copy one of them to all machines, or use a shared folder."
        )
    return None
