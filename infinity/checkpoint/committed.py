"""Checkpoints of states that a durable run has committed: copies of its slots, made inside the kernel.

Each rank that holds a shard writes two files: `states-00000.bin` with its extents, one after the other, and
`layout-00000.json` with the place of each parameter. Hard links are never used, since the run overwrites its slots.
XFS and btrfs share the bytes of aligned ranges instead of copying them.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.checkpoint.format import Index, file_in, layout_file, states_file
from infinity.checkpoint.rank_states import RankStates, Shards, well_formed
from infinity.checkpoint.tensors import FileRecord, read_crc32, write_bytes
from infinity.errors import CheckpointError, OutOfSpaceError
from infinity.inputs import parse_json, read_input
from infinity.plan.placement import State, aligned
from infinity.tiers.transfer import Transfer

_PIECE = 256 << 20
"""Bytes of one system call, during which Ctrl-C has no effect."""
_UNSUPPORTED = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}
"""Errors of copy_file_range between two file systems, and on file systems and kernels that lack it."""


def clone_range(source: int, start: int, target: int, place: int, nbytes: int) -> None:
    """Copy bytes [start, start + nbytes) of a file to byte `place` of another. source, target: descriptors.

    Raises OSError, with errno EIO if the source is too short.
    """
    copy = _copy_file_range
    while nbytes:
        try:
            count = copy(source, start, target, place, min(nbytes, _PIECE))
        except OSError as error:
            if copy is _sendfile or error.errno not in _UNSUPPORTED:
                raise
            count = 0
        if not count:
            if copy is _sendfile:
                raise OSError(errno.EIO, f"the file ends before byte {start + nbytes:,}: it was cut short")
            copy = _sendfile
            continue
        start, place, nbytes = start + count, place + count, nbytes - count


def drop_cached(file: int, start: int = 0, nbytes: int = 0) -> None:
    """Drop written-back pages of [start, start + nbytes) from the page cache. nbytes: 0 means to the end."""
    os.posix_fadvise(file, start, nbytes, os.POSIX_FADV_DONTNEED)


def _copy_file_range(source: int, start: int, target: int, place: int, nbytes: int) -> int:
    return os.copy_file_range(source, target, nbytes, start, place)


def _sendfile(source: int, start: int, target: int, place: int, nbytes: int) -> int:
    os.lseek(target, place, os.SEEK_SET)
    return os.sendfile(target, source, start, nbytes)


@dataclass(frozen=True)
class Committed:
    """This rank's states as of its last commit, equal to the present ones."""

    states: RankStates
    number: int
    """Number of the rank's shard; `shards` or above if the rank only has a copy of another rank's shard."""
    keep: Callable[[Callable[[int], Transfer]], None]
    """Called with a function unit → transfer: training keeps the slots of a unit until its transfer is done."""

    @property
    def shards(self) -> int:
        return int(self.states.layout["shards"])

    @property
    def nbytes(self) -> int:
        """Bytes of the file that `copy_states` writes; 0 if it writes none."""
        if self.number >= self.shards:
            return 0
        return sum(aligned(nbytes) for *_, nbytes in self.states.layout["extents"])


def copy_states(committed: Committed, folder: Path, release_unit: Callable[[int], None]) -> dict[str, FileRecord]:
    """Copy a rank's committed slots to new files in `folder`. Returns their names, sizes and checksums.

    The copy is read once for its checksum. Slots are first verified against the checksums of `aio.checksum`, if
    the run keeps any. release_unit: called with each unit once its slots are copied. Raises OSError, such as
    ChecksumError, and CheckpointError.
    """
    states, layout = committed.states, committed.states.layout
    if committed.number >= committed.shards:
        for unit in range(len(layout["units"])):
            release_unit(unit)
        return {}
    states.compare()
    compact, by_unit = _compact(layout)
    path = folder / states_file(committed.number)
    with path.open("xb", buffering=0) as file, ExitStack() as stack:
        members = states.opened(stack)
        for unit, targets in by_unit.items():
            for state, target in targets:
                source, nbytes = states.places[unit, state]
                for member, start, count in states.ranges(source, aligned(nbytes)):
                    clone_range(members[member], start, file.fileno(), target, count)
                    drop_cached(members[member], start, count)
                    target += count
            release_unit(unit)
        os.fsync(file.fileno())
        record = FileRecord(os.fstat(file.fileno()).st_size, read_crc32(path))
        drop_cached(file.fileno())
    name = layout_file(committed.number)
    return {path.name: record, name: write_bytes(folder / name, json.dumps(compact).encode())}


def _compact(layout: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, list[tuple[State, int]]]]:
    """Return the layout of a file that holds one slot of each extent, in one folder; and unit → its states and their
    places in that file.
    """
    by_unit: dict[int, list[tuple[State, int]]] = {}
    extents, end = [], 0
    for unit, state, _, _, nbytes in layout["extents"]:
        extents.append([unit, state, end, end, nbytes])
        by_unit.setdefault(unit, []).append((State(state), end))
        end += aligned(nbytes)
    kept = {key: value for key, value in layout.items() if key != "weights"}
    return {**kept, "extents": extents, "folders": 1, "nbytes": end, "checksum_block": 0}, by_unit


def check_space(folder: Path, nbytes: int) -> None:
    """Raise OutOfSpaceError if `nbytes` are not free in `folder`.

    Bytes shared with the run take space once training overwrites its slots, in the step after the next one.
    """
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if status.f_blocks and free < nbytes:
        raise OutOfSpaceError(str(folder), nbytes, free, "free space, or save to another drive")


def open_shards(index: Index, folder: Path) -> Shards:
    """Open the states of a checkpoint that `copy_states` wrote.

    Raises CheckpointError if a file is missing, damaged, or has other parameters than the index.
    """
    shards = Shards([_open(folder, number) for number in range(index.shards)])
    found = {
        name: (slot.shape, unit.layout.dtype, unit.layout.trainable) for name, (unit, slot) in shards.slots.items()
    }
    expected = {name: (tuple(e.shape), e.torch_dtype, e.trainable) for name, e in index.parameters.items()}
    layout = shards.ranks[0].layout
    settings = (str(layout["optimizer"]), layout["moments"])
    if found != expected or settings != (index.optimizer, index.moments):
        raise CheckpointError(
            f"{folder / layout_file(0)} has other parameters or formats than the index: the checkpoint is damaged, use "
            "another one"
        )
    return shards


def _open(folder: Path, number: int) -> RankStates:
    path = file_in(folder, layout_file(number))
    try:
        layout = parse_json(read_input(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): the checkpoint is damaged, use another one") from None
    with well_formed(path):
        return RankStates([file_in(folder, states_file(number))], layout, bytes(len(layout["extents"])))
