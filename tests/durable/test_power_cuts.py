"""Power cuts: every write of a run is recorded, and the files are rebuilt as a drive may leave them.

At a power cut, a file holds what was written before its last sync, and any of the writes since. One of them may be torn
at a sector. The last commit that was agreed on, or a later one, must be found, with all its bytes.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.durable import commits, record
from infinity.durable.folder import read_generations
from infinity.durable.record import Record, read_record
from infinity.engine.training import TrainingEngine
from infinity.plan.durable import Durable
from infinity.tiers.durable import DurableTier
from infinity.tiers.files import SwapFile
from infinity.tiers.transfer import Transfer
from support.configs import engine_config
from support.loops import open_engine
from support.models import VOCABULARY, Stack

SECTOR = 512
STATES = "states"


@dataclass(frozen=True)
class Write:
    """Bytes written to a file at an offset; content None: the file was cut to `offset` bytes."""

    file: str
    offset: int
    content: bytes | None


@dataclass
class Trace:
    """Writes, syncs (the name of a file) and agreed commits (their number), in order; and the bytes of each commit."""

    events: list[Write | str | int] = field(default_factory=list)
    expected: dict[int, list[bytes]] = field(default_factory=dict)
    extents: tuple[Durable, ...] = ()
    nbytes: int = 0


def recorded(folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch, *, late: float = 0.1, **options: Any) -> Trace:
    """Train a durable run, and return what it wrote. late: seconds that a commit waits before its sync."""
    trace = Trace()

    with monkeypatch.context() as patch:
        write_at, sync, agree = DurableTier._write_at, SwapFile.sync, commits.DurableRun.conclude
        pwrite, ftruncate, fsync = os.pwrite, os.ftruncate, os.fsync

        def watched_write(tier: DurableTier, place: int, memory: torch.Tensor, extent: Any) -> Transfer:
            trace.events.append(Write(STATES, place, memory.cpu().numpy().tobytes()))
            return write_at(tier, place, memory, extent)

        def watched_sync(file: SwapFile) -> None:
            time.sleep(late)  # the next step's updates would begin meanwhile
            sync(file)
            trace.events.append(STATES)

        def name_of(fd: int) -> str:
            return Path(os.readlink(f"/proc/self/fd/{fd}")).name

        class Os:
            """`os` of the module of records."""

            def __getattr__(self, name: str) -> Any:
                return getattr(os, name)

            def pwrite(self, fd: int, content: Any, offset: int) -> int:
                trace.events.append(Write(name_of(fd), offset, bytes(content)))
                return pwrite(fd, content, offset)

            def ftruncate(self, fd: int, nbytes: int) -> None:
                trace.events.append(Write(name_of(fd), nbytes, None))
                ftruncate(fd, nbytes)

            def fsync(self, fd: int) -> None:
                fsync(fd)
                trace.events.append(name_of(fd))

        def agreed(run: commits.DurableRun) -> None:
            assert run.record is not None
            trace.events.append(run.record.number)
            agree(run)

        patch.setattr(DurableTier, "_write_at", watched_write)
        patch.setattr(SwapFile, "sync", watched_sync)
        patch.setattr(record, "os", Os())
        patch.setattr(commits.DurableRun, "conclude", agreed)
        torch.manual_seed(0)
        with open_engine(Stack(16, 2), engine_config(folder=folder, durable=True, **options)) as engine:
            assert engine.parts.plan.io is not None and engine.parts.plan.io.durable is not None
            trace.extents, trace.nbytes = engine.parts.plan.io.durable.extents, engine.parts.plan.io.nbytes
            for number in range(1, steps + 1):
                train(engine, number)
    torch.manual_seed(0)
    with open_engine(Stack(16, 2), engine_config(folder=folder, **options)) as engine:
        for number in range(1, steps + 1):
            train(engine, number)
            engine.settle()
            trace.expected[number] = contents(engine, trace.extents)
    return trace


def train(engine: TrainingEngine, number: int) -> None:
    tokens = torch.randint(VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(number))
    engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
    engine.step()


def contents(engine: TrainingEngine, extents: tuple[Durable, ...]) -> list[bytes]:
    """The present bytes of each durable extent."""
    found = []
    for each in extents:
        memory = torch.empty(each.working.nbytes, dtype=torch.uint8)
        engine.parts.tiers[each.working.tier].read(each.working, memory).wait()
        found.append(memory.numpy().tobytes())
    return found


class Drive:
    """The synced bytes of a run's files, and the writes since."""

    def __init__(self, trace: Trace, folder: Path) -> None:
        self.trace, self.folder = trace, folder
        self.synced: dict[str, bytearray] = {STATES: bytearray(trace.nbytes)}
        self.since: list[Write] = []

    def write(self, write: Write) -> None:
        self.since.append(write)

    def sync(self, file: str) -> None:
        for write in self.since:
            if write.file == file:
                apply(self.synced, write)
        self.since = [write for write in self.since if write.file != file]

    def check(self, kept: tuple[Write, ...], agreed: int) -> None:
        """Assert that a drive with these of the writes since has a commit, `agreed` or later, and all its bytes."""
        files = {name: bytearray(content) for name, content in self.synced.items()}
        for write in kept:
            apply(files, write)
        for name in ("rank-00000.record-0", "rank-00000.record-1"):
            path = self.folder / name
            if name in files:
                path.write_bytes(files[name])
            else:
                path.unlink(missing_ok=True)
        found = [each for slot in (0, 1) if (each := read_record(self.folder / f"rank-00000.record-{slot}"))]
        last = max(found, key=lambda each: each.number, default=None)
        if last is None:
            assert agreed == 0
            return
        assert last.number >= agreed
        self.compare(last, files[STATES])

    def compare(self, last: Record, states: bytearray) -> None:
        expected = self.trace.expected[last.progress.global_steps]
        for each, slot, content in zip(self.trace.extents, last.slots, expected, strict=True):
            place = (each.first, each.second)[slot]
            assert states[place.offset : place.offset + place.nbytes] == content, (last.number, place.name)


def apply(files: dict[str, bytearray], write: Write) -> None:
    content = files.setdefault(write.file, bytearray())
    if write.content is None:
        del content[write.offset :]
        return
    content.extend(bytes(max(0, write.offset + len(write.content) - len(content))))
    content[write.offset : write.offset + len(write.content)] = write.content


def subsets(writes: list[Write], seeded: int, draw: random.Random) -> Iterator[tuple[Write, ...]]:
    """All subsets of up to 8 writes, else `seeded` drawn ones; and as many with one write torn at a sector."""
    if len(writes) <= 8:
        chosen = [tuple(itertools.compress(writes, bits)) for bits in itertools.product((0, 1), repeat=len(writes))]
    else:
        chosen = [tuple(write for write in writes if draw.random() < 0.5) for _ in range(seeded)]
    for kept in chosen:
        yield kept
        if kept:
            torn = draw.randrange(len(kept))
            write = kept[torn]
            if write.content is not None and len(write.content) > 1:
                stop = draw.randrange(1, len(write.content))
                part = Write(write.file, write.offset, write.content[: stop - stop % SECTOR])
                yield (*kept[:torn], part, *kept[torn + 1 :])


def replay(trace: Trace, folder: Path, seeded: int, seed: int) -> int:
    """Cut the power before and after every sync. Returns the number of cuts."""
    draw, drive, agreed, cuts = random.Random(seed), Drive(trace, folder), 0, 0
    for event in trace.events:
        if isinstance(event, Write):
            drive.write(event)
            continue
        for kept in subsets(drive.since, seeded, draw):
            drive.check(kept, agreed)
            cuts += 1
        if isinstance(event, int):
            agreed = event
        else:
            drive.sync(event)
    return cuts


CASES: dict[str, dict[str, Any]] = {
    "during backward": {},
    "next forward": {"clip": 0.5},
    "in host memory": {"param": "cpu", "optim": "cpu", "clip": 0.5},
    "bf16, 8 bit": {"bf16": True, "moments": "8bit"},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_power_cut_leaves_the_last_commit_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    trace = recorded(tmp_path, 5, monkeypatch, **options)
    (tmp_path / "drive").mkdir()
    assert replay(trace, tmp_path / "drive", seeded=10, seed=1) > 100
    assert read_generations(tmp_path / "run")


@pytest.mark.campaign
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_power_cuts_in_twenty_steps_leave_the_last_commit_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], seed: int
) -> None:
    trace = recorded(tmp_path, 20, monkeypatch, **options)
    (tmp_path / "drive").mkdir()
    print(f"seed {seed}: {replay(trace, tmp_path / 'drive', seeded=1000, seed=seed):,} power cuts")


def test_the_replay_finds_a_record_that_is_written_before_its_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the sync of states before the record, a power cut leaves a record of other bytes."""
    trace = recorded(tmp_path, 5, monkeypatch)
    trace.events = [event for event in trace.events if event != STATES]
    (tmp_path / "drive").mkdir()
    with pytest.raises(AssertionError):
        replay(trace, tmp_path / "drive", seeded=50, seed=1)
