"""The files of a rank as a drive may leave them when the power fails.

A file holds what was written before its last sync, and any of the writes since. One of them may be torn at a sector.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from durable.recorder import STATES, Log, Write
from infinity.durable.folder import record_file
from infinity.durable.record import Record, read_record

SECTOR = 512
Files = dict[str, bytearray]


@dataclass(frozen=True)
class Found:
    """Commits that a rank finds after a power cut."""

    whole: tuple[tuple[int, int], ...]
    """(number, step) of intact records whose states have the right bytes."""
    broken: tuple[int, ...]
    """Numbers of intact records whose states have other bytes."""
    is_damaged: bool
    """True if the file that the first commit begins once all ranks have it is there, and no record is intact."""

    @property
    def numbers(self) -> tuple[int, ...]:
        return (*(number for number, _ in self.whole), *self.broken)


class Drive:
    """The synced bytes of a rank's files, and the writes since."""

    def __init__(self, log: Log, folder: Path) -> None:
        """folder: holds the records that are read."""
        self._log, self._folder = log, folder
        self.synced: Files = {STATES: bytearray(log.nbytes)}
        self.since: list[Write] = []

    def write(self, write: Write) -> None:
        self.since.append(write)

    def sync(self, file: str) -> None:
        for write in self.since:
            if write.file == file:
                apply(self.synced, write)
        self.since = [write for write in self.since if write.file != file]

    def left(self, kept: tuple[Write, ...]) -> Files:
        """The files with these of the writes since the last syncs."""
        files = {name: bytearray(content) for name, content in self.synced.items()}
        for write in kept:
            apply(files, write)
        return files

    def found(self, kept: tuple[Write, ...]) -> Found:
        """Return the commits that a start finds in these files."""
        files = self.left(kept)
        records = []
        for slot in (0, 1):
            path = record_file(self._folder, self._log.rank, slot)
            if path.name in files:
                path.write_bytes(files[path.name])
                if (record := read_record(path)) is not None:
                    records.append(record)
        good = [each for each in records if is_whole(self._log, each, files[STATES])]
        return Found(
            tuple((each.number, each.progress.global_steps) for each in good),
            tuple(each.number for each in records if each not in good),
            record_file(self._folder, self._log.rank, 0).name in files and not records,
        )


def is_whole(log: Log, record: Record, states: bytearray) -> bool:
    """Return whether the states are those of the record's step."""
    places = [(each.first, each.second)[slot] for each, slot in zip(log.extents, record.slots, strict=True)]
    return all(
        states[place.offset : place.offset + place.nbytes] == content
        for place, content in zip(places, log.expected[record.progress.global_steps], strict=True)
    )


def apply(files: Files, write: Write) -> None:
    content = files.setdefault(write.file, bytearray())
    if write.content is None:
        del content[write.offset :]
        return
    content.extend(bytes(max(0, write.offset + len(write.content) - len(content))))
    content[write.offset : write.offset + len(write.content)] = write.content


def subsets(writes: list[Write], seeded: int, draw: random.Random) -> Iterator[tuple[Write, ...]]:
    """All subsets of up to 8 writes. Of more: all of them, none, each alone, all but each, and `seeded` drawn ones.

    And as many with one write torn at a sector.
    """
    if len(writes) <= 8:
        chosen = [tuple(itertools.compress(writes, bits)) for bits in itertools.product((0, 1), repeat=len(writes))]
    else:
        alone = [(write,) for write in writes]
        without = [(*writes[:index], *writes[index + 1 :]) for index in range(len(writes))]
        drawn = [tuple(write for write in writes if draw.random() < 0.5) for _ in range(seeded)]
        chosen = [(), tuple(writes), *alone, *without, *drawn]
    for kept in chosen:
        yield kept
        if kept:
            torn = draw.randrange(len(kept))
            write = kept[torn]
            if write.content is not None and len(write.content) > 1:
                stop = draw.randrange(1, len(write.content))
                part = Write(write.file, write.offset, write.content[: stop - stop % SECTOR])
                yield (*kept[:torn], part, *kept[torn + 1 :])
