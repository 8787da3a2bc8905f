"""Records a rank of a durable run: writes to its drive, syncs, and exchanges with other ranks, in their order.

A sync is noted after it has ended and a write before it begins, so no order of the log is safer than the run was.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from infinity.comm.side import SideChannel
from infinity.durable import commits, record
from infinity.durable.record import Record
from infinity.durable.run import open_run
from infinity.engine import platform
from infinity.engine.training import TrainingEngine
from infinity.plan.io import Durable
from infinity.tiers.digests import Digests
from infinity.tiers.durable import DurableTier
from infinity.tiers.files import SwapFile
from infinity.tiers.transfer import Transfer

STATES = "states"
"""Name of the file of a rank's states."""


@dataclass(frozen=True)
class Write:
    """Bytes written to a file at an offset; content None: the file was cut to `offset` bytes."""

    file: str
    offset: int
    content: bytes | None


@dataclass(frozen=True)
class Sync:
    """All writes to the file so far have reached the drive."""

    file: str


@dataclass(frozen=True)
class Enter:
    """The rank gives its part of an all-gather. kind, number: equal on all ranks."""

    kind: str
    number: int


@dataclass(frozen=True)
class Leave:
    """The rank has the parts of all ranks, so each has entered."""

    kind: str
    number: int


@dataclass(frozen=True)
class Committed:
    """All ranks have committed the step, or resumed from it."""

    step: int


@dataclass(frozen=True)
class Returned:
    """`engine.step()` of the step has returned."""

    step: int


Event = Write | Sync | Enter | Leave | Committed | Returned


class Killed(BaseException):
    """Ends a commit as the end of the process would: nothing is written after it."""


@dataclass(frozen=True)
class End:
    """The end of a process while it commits: after_write: between the write and the sync of its record, else before
    the write.
    """

    step: int
    ranks: tuple[int, ...]
    after_write: bool


@dataclass
class Log:
    """The events of one rank. order: a file of all ranks, with one byte for each event of any: the rank that noted it.

    Appends to a file are atomic, so events stand there in the order of time.
    """

    rank: int = 0
    order: Path | None = None
    end: End | None = None
    """How the present process of this rank ends."""
    events: list[Event] = field(default_factory=list)
    expected: dict[int, list[bytes]] = field(default_factory=dict)
    """Step → bytes of each extent in a run that nothing interrupts."""
    extents: tuple[Durable, ...] = ()
    nbytes: int = 0
    """Size of the file of states."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Contents of files that are complete before the first commit, by name."""
    _lock: Any = field(default_factory=threading.Lock)
    _counts: dict[str, int] = field(default_factory=dict)

    def note(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)
            if self.order is not None:
                with open(self.order, "ab", buffering=0) as file:
                    file.write(bytes([self.rank]))

    @contextmanager
    def exchange(self, kind: str) -> Iterator[None]:
        number = self._counts[kind] = self._counts.get(kind, 0) + 1
        self.note(Enter(kind, number))
        yield
        self.note(Leave(kind, number))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}  # it is sent from the process of a rank to that of the test


@contextmanager
def recorded(log: Log, *, late: float) -> Iterator[None]:
    """Note what the durable run of this process does in the block. late: seconds that a commit waits before its sync,
    in which the next step's updates would begin.
    """
    write_at, sync, total = DurableTier._write_at, SwapFile.sync, SideChannel.sum
    conclude, write = commits.DurableRun.conclude, commits.DurableRun.write

    def watched_write(tier: DurableTier, place: int, memory: torch.Tensor, extent: Any, file: Any = None) -> Transfer:
        log.note(Write(STATES, place, memory.cpu().numpy().tobytes()))
        return write_at(tier, place, memory, extent, file)

    def watched_sync(file: SwapFile) -> None:
        time.sleep(late)
        sync(file)
        log.note(Sync(STATES))

    def watched_conclude(run: commits.DurableRun) -> None:
        assert run.record is not None
        log.note(Committed(run.record.progress.global_steps))
        conclude(run)

    def watched_record(run: commits.DurableRun, content: Record, digests: Digests) -> None:
        if log.end is not None and log.end.step == content.progress.global_steps and log.rank in log.end.ranks:
            if not log.end.after_write:
                raise Killed
            with mock.patch.object(record, "os", _Os(log, dies=True)):
                write(run, content, digests)
        write(run, content, digests)

    def watched_sum(channel: SideChannel, value: float) -> float:
        with log.exchange("commit"):
            return total(channel, value)

    with ExitStack() as stack:
        for owner, name, seam in (
            (DurableTier, "_write_at", watched_write),
            (SwapFile, "sync", watched_sync),
            (commits.DurableRun, "conclude", watched_conclude),
            (commits.DurableRun, "write", watched_record),
            (SideChannel, "sum", watched_sum),
            (record, "os", _Os(log)),
            (platform, "open_run", lambda plan, config, ranks: open_run(plan, config, _Exchanges(log, ranks))),
        ):
            stack.enter_context(mock.patch.object(owner, name, seam))
        yield


class _Os:
    """`os` of the module of records."""

    def __init__(self, log: Log, *, dies: bool = False) -> None:
        """dies: raise Killed instead of a sync."""
        self._log, self._dies = log, dies

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, fd: int, content: Any, offset: int) -> int:
        self._log.note(Write(_name_of(fd), offset, bytes(content)))
        return os.pwrite(fd, content, offset)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        self._log.note(Write(_name_of(fd), nbytes, None))
        os.ftruncate(fd, nbytes)

    def fsync(self, fd: int) -> None:
        if self._dies:
            raise Killed
        os.fsync(fd)
        self._log.note(Sync(_name_of(fd)))


def _name_of(fd: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{fd}")).name


class _Exchanges:
    """The communicator of a run that is opened."""

    def __init__(self, log: Log, ranks: Any) -> None:
        self._log, self._ranks = log, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def gather(self, value: Any) -> list[Any]:
        with self._log.exchange("start"):
            return list(self._ranks.gather(value))

    def barrier(self) -> None:
        with self._log.exchange("start"):
            self._ranks.barrier()


def contents(engine: TrainingEngine, extents: tuple[Durable, ...]) -> list[bytes]:
    """The present bytes of each durable extent."""
    found = []
    for each in extents:
        memory = torch.empty(each.working.nbytes, dtype=torch.uint8)
        engine.parts.tiers[each.working.tier].read(each.working, memory).wait()
        found.append(memory.numpy().tobytes())
    return found
